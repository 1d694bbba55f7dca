// Pictures on canvases, small pieces of the page, and plots.
import { whenBack } from "./api.js";

export const $ = (id) => document.getElementById(id);

/** An element with properties and children. */
export function el(tag, given = {}, ...children) {
  const made = Object.assign(document.createElement(tag), given);
  made.append(...children);
  return made;
}

export function note(place, text, bad = false) {
  const line = typeof place === "string" ? $(place) : place;
  line.textContent = text;
  line.classList.toggle("bad", bad);
}

/** Say what failed; where the server was away, do it again when it is back, or take the words back. */
export function sorry(place, error, again = () => note(place, "")) {
  note(place, error.message, true);
  if (error.status === 0) whenBack(place, again);
}

/** Do a thing when its wishes have ceased for a moment. */
export function soon(work, wait = 120) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(work, wait); };
}

/** A button that waits for an answer keeps the focus, and does nothing. */
export const waits = (button, on) => button.setAttribute("aria-disabled", String(on));
export const waiting = (button) => button.getAttribute("aria-disabled") === "true";

/** The number in a field, or null when it is not one of those that the field takes: then `place` says so. */
export function number(field, place, name, whole = true) {
  const low = Number(field.min), high = Number(field.max), value = field.value === "" ? NaN : Number(field.value);
  const good = value >= low && value <= high && (!whole || Number.isInteger(value));
  field.setAttribute("aria-invalid", String(!good));
  if (good) return value;
  const got = field.value || (field.validity.badInput ? "something else" : "nothing");
  note(place, `${name}: expected a ${whole ? "whole " : ""}number from ${low} to ${high}, got ${minus(got)}.`, true);
  return null;
}

export const minus = (value) => String(value).replaceAll("-", "−");

/** Buttons of which one is pressed; `chosen(value)` hears of a change. */
export function segments(id, key, chosen) {
  const group = $(id);
  group.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    press(group, button);
    chosen(button.dataset[key]);
  });
}
export function press(group, button) {
  for (const each of group.querySelectorAll("button")) each.setAttribute("aria-pressed", String(each === button));
}

export const nats = (value) => (value === null || value === undefined ? "not finite" : `${minus(value.toFixed(1))} nats`);
export const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
export const text64 = (array) => btoa(Array.from(array, (each) => String.fromCharCode(each)).join(""));

/** Height and width of a run's images. */
export const size = (run) => run.shape.slice(-2);

/** Draw a picture of a run, pixel by pixel. */
export function paint(canvas, run, picture) {
  const [height, width] = size(run);
  const raw = bytes(picture);
  const kind = { uint8: Uint8Array, uint16: Uint16Array, float32: Float32Array }[run.dtype];
  const values = new kind(raw.buffer);
  const planes = run.shape.length === 3 ? run.shape[0] : 1;
  const image = new ImageData(width, height);
  const pixels = width * height;
  for (let i = 0; i < pixels; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = Math.round(255 * values[(planes === 3 ? c * pixels : 0) + i] / run.brightest);
    image.data[4 * i + 3] = 255;
  }
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.dataset.picture = picture;
  return canvas;
}

export function thumbnail(run, picture, label, chosen) {
  const button = el("button", { type: "button", ariaLabel: label }, paint(el("canvas"), run, picture));
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => chosen(button, picture));
  return button;
}

/** A field to drop files on, with its file input. */
export function dropping(zone, input, taken) {
  const over = (on) => (event) => { event.preventDefault(); zone.classList.toggle("over", on); };
  zone.addEventListener("dragover", over(true));
  zone.addEventListener("dragleave", over(false));
  zone.addEventListener("drop", (event) => { over(false)(event); if (event.dataTransfer.files.length) taken([...event.dataTransfer.files]); });
  input.addEventListener("change", () => { if (input.files.length) taken([...input.files]); input.value = ""; });
}

export function download(content, name) {
  const address = URL.createObjectURL(content);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, given = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((each) => each * unit >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}
const short = (value) => minus(Math.abs(value) >= 1e4 ? value.toExponential(0) : Number(value.toPrecision(4)));

/** Lines over one axis. Series: {name, points: [[x, y]], look}; marks: {x or y, name, look}. */
export class Plot {
  constructor(id, { x = "", y = "", log = false, tip = null, floor = null } = {}) {
    Object.assign(this, { figure: $(id), xName: x, yName: y, log, tipText: tip, floor, series: [], marks: [] });
    this.view = svg("svg", { "aria-hidden": "true" });
    this.tip = el("div", { className: "tip", role: "status", hidden: true });
    this.at = null;
    this.legend = el("div", { className: "legend" });
    this.figure.replaceChildren(this.view, this.legend, this.tip);
    new ResizeObserver(() => this.draw()).observe(this.figure);
    if (!tip) return;
    this.figure.tabIndex = 0;
    this.figure.setAttribute("role", "application");
    this.figure.setAttribute("aria-label", `${this.figure.getAttribute("aria-label")}; arrow keys read the values`);
    for (const each of ["pointerdown", "pointermove"]) this.figure.addEventListener(each, (event) => this.hover(event));
    this.figure.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.point(null); });
    this.figure.addEventListener("blur", () => this.point(null));
    this.figure.addEventListener("keydown", (event) => this.key(event));
  }

  show(series, marks = [], range = {}) {
    Object.assign(this, { series, marks, range });
    if (!series.length) this.at = null;
    this.draw();
  }

  draw() {
    const { width, height } = this.figure.getBoundingClientRect();
    if (!width || !height) return;
    const all = this.series.flatMap((each) => each.points).filter(([, y]) => Number.isFinite(y));
    this.view.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.view.replaceChildren();
    const named = [...this.series, ...this.marks].filter((each) => each.name && !each.silent);
    this.legend.replaceChildren(...named.map((each) => el("span", {}, el("i", { className: each.look ?? "" }), each.name)));
    this.point(null, false);
    if (!all.length) return this.view.append(svg("line", { class: "grid", x1: 46, x2: width - 8, y1: height - 20, y2: height - 20 }));
    const box = { left: 46, right: width - 8, top: named.length ? 20 : 8, bottom: height - (this.xName ? 34 : 20) };
    const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
    let [x0, x1] = this.range?.x ?? [Math.min(...xs), Math.max(...xs)];
    const levels = this.marks.filter((each) => each.y !== undefined).map((each) => each.y);
    let [y0, y1] = this.range?.y ?? [Math.min(this.low(ys), ...levels), Math.max(...ys, ...levels)];
    if (x0 === x1) x1 = x0 + 1;
    if (this.log) { y0 = Math.max(y0, 1e-6); } else if (!this.range?.y) { const pad = 0.06 * (y1 - y0) || 1; y0 -= pad; y1 += pad; }
    const ease = this.log ? Math.log10 : (value) => value;
    this.sx = (x) => box.left + (box.right - box.left) * (x - x0) / (x1 - x0);
    this.sy = (y) => box.bottom - (box.bottom - box.top) * Math.min(1, Math.max(0, (ease(y) - ease(y0)) / (ease(y1) - ease(y0) || 1)));
    Object.assign(this, { box, x0, x1 });
    const rows = this.log ? ticks(Math.log10(y0), Math.log10(y1), 3).map((each) => 10 ** each) : ticks(y0, y1, Math.max(3, height / 50));
    if (this.yName !== null) for (const at of rows) {
      this.view.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: this.sy(at), y2: this.sy(at) }));
      this.view.append(this.word(box.left - 6, this.sy(at) + 4, this.log ? Number(at.toPrecision(2)) : short(at), "end"));
    }
    for (const at of ticks(x0, x1, Math.max(2, Math.floor(width / 90)))) this.view.append(this.word(this.sx(at), box.bottom + 15, short(at), "middle"));
    if (this.xName) this.view.append(this.word((box.left + box.right) / 2, height - 4, this.xName, "middle"));
    for (const mark of this.marks) {
      const at = mark.y !== undefined
        ? { x1: box.left, x2: box.right, y1: this.sy(mark.y), y2: this.sy(mark.y) }
        : { x1: this.sx(mark.x), x2: this.sx(mark.x), y1: box.top, y2: box.bottom };
      this.view.append(svg("line", { class: `line ${mark.look ?? ""}`, ...at }));
    }
    const last = (each) => Number(Boolean(each.look?.includes("accent")));
    for (const { points, look, area } of [...this.series].sort((a, b) => last(a) - last(b))) {
      const way = points.filter(([, y]) => Number.isFinite(y)).map(([x, y]) => `${this.sx(x).toFixed(1)},${this.sy(y).toFixed(1)}`).join(" ");
      this.view.append(svg("polyline", { class: area ? "band" : `line ${look ?? ""}`, points: way }));
    }
    if (this.at !== null) this.point(Math.min(this.at, this.series[0].points.length - 1));
  }

  /** The lowest value worth showing: where the curve comes from is left out. */
  low(ys) {
    if (this.floor === null || ys.length < 5) return Math.min(...ys);
    const sorted = [...ys].sort((a, b) => a - b);
    return sorted[Math.floor(this.floor * sorted.length)];
  }

  word(x, y, text, anchor) {
    const made = svg("text", { x, y, "text-anchor": anchor });
    made.textContent = text;
    return made;
  }

  hover(event) {
    const points = this.series[0]?.points ?? [];
    if (!points.length || !this.box) return;
    const frame = this.figure.getBoundingClientRect();
    const x = this.x0 + (this.x1 - this.x0) * (event.clientX - frame.left - this.box.left) / (this.box.right - this.box.left);
    this.point(points.reduce((best, each, i) => (Math.abs(each[0] - x) < Math.abs(points[best][0] - x) ? i : best), 0));
  }

  key(event) {
    const count = this.series[0]?.points.length ?? 0, now = this.at ?? (event.key === "ArrowLeft" ? count : -1);
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, PageDown: now + 10, PageUp: now - 10, Home: 0, End: count - 1 }[event.key];
    if (event.key === "Escape") this.point(null);
    if (to === undefined || !count) return;
    event.preventDefault();
    this.point(Math.min(count - 1, Math.max(0, to)));
  }

  /** Show the values at a point of the first series, or of none; `keep` is false where only the picture is drawn anew. */
  point(at, keep = true) {
    if (keep) this.at = at;
    this.cross?.remove();
    this.tip.hidden = at === null;
    if (at === null) return;
    this.tip.textContent = minus(this.tipText(at, this.series));
    const place = this.sx(this.series[0].points[at][0]);
    this.cross = svg("line", { class: "cross", x1: place, x2: place, y1: this.box.top, y2: this.box.bottom });
    this.view.append(this.cross);
    this.tip.style.left = 0;
    this.tip.style.left = `${Math.max(0, Math.min(place + 8, this.figure.clientWidth - this.tip.offsetWidth))}px`;
  }
}
