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

const HEAT = [[16, 23, 28], [103, 30, 66], [200, 62, 74], [247, 164, 92], [255, 244, 214]];

/** Draw numbers from 0 to `most`, one for each pixel of a run's images, from dark to bright. */
export function heat(canvas, run, values, most) {
  const [height, width] = size(run), image = new ImageData(width, height);
  values.forEach((value, i) => {
    const place = Math.min(1, Math.max(0, value / (most || 1))) * (HEAT.length - 1), k = Math.min(HEAT.length - 2, Math.floor(place));
    image.data.set([...HEAT[k].map((each, c) => each + (place - k) * (HEAT[k + 1][c] - each)), 255], 4 * i);
  });
  Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

export function thumbnail(run, picture, label, chosen) {
  const button = el("button", { type: "button", ariaLabel: label }, paint(el("canvas"), run, picture));
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => chosen(button, picture));
  return button;
}

/** Fill a group with buttons that are one tab stop: arrow keys move among them. */
export function fill(group, buttons) {
  group.replaceChildren(...buttons);
  const stop = (one) => { for (const each of group.children) each.tabIndex = each === one ? 0 : -1; };
  stop(group.firstElementChild);
  for (const each of buttons) each.addEventListener("focus", () => stop(each));
  group.onkeydown = (event) => {
    const all = [...group.children], now = all.indexOf(document.activeElement), row = all.filter((each) => each.offsetTop === all[0].offsetTop).length;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, ArrowUp: now - row, ArrowDown: now + row, Home: 0, End: all.length - 1 }[event.key];
    if (now < 0 || !all[to]) return;
    event.preventDefault();
    all[to].focus();
  };
}

/** A picture file that the server takes: one that is too large for it, as photos are, is made smaller here. */
export async function modest(file, limits) {
  let bitmap;
  try { bitmap = await createImageBitmap(file); } catch { return file; } // of another kind: the server says what it makes of it
  const side = Math.max(bitmap.width, bitmap.height);
  if (file.size <= limits.body && side <= limits.side) return file;
  const scale = Math.min(1, 1024 / side), canvas = el("canvas", { width: Math.max(1, Math.round(scale * bitmap.width)), height: Math.max(1, Math.round(scale * bitmap.height)) });
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return new Promise((done) => canvas.toBlob(done));
}

/** A field to drop files on, with its file input. */
export function dropping(zone, input, taken) {
  const over = (on) => (event) => { event.preventDefault(); zone.classList.toggle("over", on); };
  zone.addEventListener("dragover", over(true));
  zone.addEventListener("dragleave", over(false));
  zone.addEventListener("drop", (event) => { over(false)(event); if (event.dataTransfer.files.length) taken([...event.dataTransfer.files]); });
  input.addEventListener("change", () => { if (input.files.length) taken([...input.files]); input.value = ""; });
}

export const figure = (value, digits) => (typeof value === "number" ? minus(Number.isInteger(value) ? value : Number(value.toPrecision(digits))) : String(value));
export const cell = (value) => (value === null ? "–" : figure(value, 6));

/** A table of cells, numbers to the right. */
export function table(names, lines) {
  const kind = (value) => (typeof value === "number" ? "number" : "");
  const head = el("tr", {}, ...names.map((name, i) => el("th", { scope: "col", className: kind(lines[0]?.[i]) }, name)));
  const body = lines.map((line) => el("tr", {}, ...line.map((value) => el("td", { className: kind(value) }, cell(value)))));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
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

/** Round numbers from low to high, each with its label: at most `count` of them if that leaves two, and no label twice. */
export function ticks(low, high, count) {
  const top = Math.ceil(Math.log10(high - low || 1));
  let best = null;
  for (let k = 0; k < 30; k++) {
    const step = [5, 2, 1][k % 3] * 10 ** (top - Math.floor(k / 3));
    const first = Math.ceil(low / step - 1e-9), number = Math.floor(high / step + 1e-9) - first + 1;
    if (number > count && best?.number >= 2) break;
    best = { step, first, number };
    if (number > count) break;
  }
  const values = Array.from({ length: Math.max(0, best.number) }, (_, i) => (best.first + i) * best.step);
  const most = Math.max(...values.map(Math.abs), best.step), power = most >= 1e4 || most < 1e-3 ? 3 * Math.floor(Math.log10(most) / 3) : 0;
  const unit = 10 ** power, digits = Math.max(0, -Math.floor(Math.log10(best.step / unit) + 1e-9)), name = { 0: "", 3: "k", 6: "M" }[power] ?? `e${power}`;
  return values.map((at) => [at, at === 0 ? "0" : minus((at / unit).toFixed(digits) + name)]);
}

/** Lines over one axis. Series: {name, points: [[x, y]], look}; marks: {x or y, name, look}. */
export class Plot {
  constructor(id, { x = "", y = "", tip = null, floor = null } = {}) {
    Object.assign(this, { figure: $(id), xName: x, yName: y, tipText: tip, floor, series: [], marks: [] });
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
    const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
    let [x0, x1] = this.range?.x ?? [Math.min(...xs), Math.max(...xs)];
    const levels = this.marks.filter((each) => each.y !== undefined).map((each) => each.y);
    let [y0, y1] = this.range?.y ?? [Math.min(this.low(ys), ...levels), Math.max(...ys, ...levels)];
    if (x0 === x1) x1 = x0 + 1;
    if (!this.range?.y) { const pad = 0.06 * (y1 - y0) || 1; y0 -= pad; y1 += pad; }
    const rows = this.yName === null ? [] : ticks(y0, y1, Math.max(3, height / 50)), wide = Math.max(0, ...rows.map(([, name]) => name.length));
    const box = { left: 14 + 6.5 * wide, right: width - 8, top: named.length ? 20 : 8, bottom: height - (this.xName ? 34 : 20) };
    this.sx = (x) => box.left + (box.right - box.left) * (x - x0) / (x1 - x0);
    this.sy = (y) => box.bottom - (box.bottom - box.top) * (y - y0) / (y1 - y0 || 1);
    Object.assign(this, { box, x0, x1 });
    for (const [at, name] of rows) {
      this.view.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: this.sy(at), y2: this.sy(at) }));
      this.view.append(this.word(box.left - 6, this.sy(at) + 4, name, "end"));
    }
    for (const [at, name] of ticks(x0, x1, Math.max(2, Math.floor(width / 90)))) this.view.append(this.word(this.sx(at), box.bottom + 15, name, "middle"));
    if (this.xName) this.view.append(this.word((box.left + box.right) / 2, height - 4, this.xName, "middle"));
    // lines that leave the frame are cut there: areas below, marks over them, lines on top, the accented last
    const frame = { x: box.left, y: box.top - 2, width: box.right - box.left, height: box.bottom - box.top + 4 };
    const inside = svg("svg", { ...frame, viewBox: `${frame.x} ${frame.y} ${frame.width} ${frame.height}` });
    const line = ({ points, look, area }) => {
      const way = points.filter(([, y]) => Number.isFinite(y)).map(([x, y]) => `${this.sx(x).toFixed(1)},${this.sy(y).toFixed(1)}`).join(" ");
      inside.append(svg("polyline", { class: area ? "band" : `line ${look ?? ""}`, points: way }));
    };
    this.series.filter((each) => each.area).forEach(line);
    for (const mark of this.marks) {
      const at = mark.y !== undefined
        ? { x1: box.left, x2: box.right, y1: this.sy(mark.y), y2: this.sy(mark.y) }
        : { x1: this.sx(mark.x), x2: this.sx(mark.x), y1: box.top, y2: box.bottom };
      inside.append(svg("line", { class: `line mark ${mark.look ?? ""}`, ...at }));
    }
    const last = (each) => Number(Boolean(each.look?.includes("accent")));
    this.series.filter((each) => !each.area).sort((a, b) => last(a) - last(b)).forEach(line);
    this.view.append(inside);
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
