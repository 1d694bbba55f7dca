// Paint over a part of an image and watch the model fill it in.
import { blob, follow, get, latest, send, whenBack } from "./api.js";
import { $, bytes, download, dropping, el, fill, heat, modest, nats, note, number, paint, Plot, press, segments, size, sorry, text64, thumbnail, waiting, waits } from "./draw.js";

const lists = latest(), takes = latest(), stencils = latest(), films = latest();
let studio, run, plot, picture = null, mask = null, tool = "brush", source = "test", page = 0;
let abort = null, chains = [], frames = [], cursor = { x: 0, y: 0 }, corner = null, marked = null, film = null, file = null;
let again = null; // the seed of the filling that is shown, or is to be made again
let method = "ascent", past = [], future = [], held = false;

export function setup(given) {
  studio = given;
  plot = new Plot("climb", { y: "nats", floor: 0.12, tip });
  segments("sources", "source", (value) => { source = value; page = 0; takes(); choices(); });
  segments("tools", "tool", (value) => { tool = value; corner = null; show(); });
  $("others").addEventListener("click", () => { page += 1; choices(); });
  segments("methods", "method", fillBy);
  $("undo").addEventListener("click", () => step(past, future));
  $("redo").addEventListener("click", () => step(future, past));
  addEventListener("keydown", (event) => {
    if ($("inpaint").hidden || !(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z" || event.target.matches("input, select")) return;
    event.preventDefault();
    if (event.shiftKey) step(future, past);
    else step(past, future);
  });
  holding();
  $("invert").addEventListener("click", () => change((bit) => 1 - bit));
  $("clear").addEventListener("click", () => change(() => 0));
  $("go").addEventListener("click", go);
  $("stop").addEventListener("click", () => abort?.abort());
  $("chains").addEventListener("change", () => { if (!abort) arrange(Number($("chains").value)); });
  $("save-png").addEventListener("click", savePng);
  $("save-gif").addEventListener("click", saveGif);
  dropping($("upload"), $("upload-file"), ([given]) => { file = given; upload(); });
  $("upload-invert").addEventListener("change", () => { if (file) upload(); });
  easel();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
}

export function choose(chosen) {
  for (const each of [lists, takes, stencils]) each();
  run = null;
  reset();
  for (const id of ["choices", "masks"]) $(id).replaceChildren();
  note("choices-note", "");
  if (chosen.kind !== "images") return;
  picture = corner = file = again = null; page = 0; cursor = { x: 0, y: 0 };
  source = chosen.data ? "samples" : "test"; // without the data there are samples
  press($("sources"), $("sources").querySelector(`[data-source=${source}]`));
  const [height, width] = size(chosen);
  mask = lowerHalf(height, width);
  past = []; future = [];
  $("brush").max = Math.max(3, Math.round(height / 3));
  $("brush").value = Math.max(1, Math.round(height / 8));
  $("chains").replaceChildren(...Array.from({ length: studio.limits.chains }, (_, i) => el("option", {}, String(i + 1))));
  $("chains").value = "4";
  fillBy(chosen.dim <= studio.limits.walk ? "draws" : "ascent"); // draws look like data, and differ
  $("steps").max = studio.limits.steps;
  reset();
}

/** By draws, or by the ascent, which alone has noise as a setting. */
function fillBy(value) {
  method = value;
  $("noise").disabled = method !== "ascent";
  press($("methods"), $("methods").querySelector(`[data-method=${method}]`));
}

/** What is hidden when the page opens: there is something to fill in at once. */
export const lowerHalf = (height, width) => new Uint8Array(height * width).fill(1, Math.floor(height / 2) * width);

export function enter(chosen) {
  if (run === chosen) return;
  run = chosen;
  show();
  masks();
  choices();
}

/** All that is shown: the image, what is hidden, and how it was filled in. */
export function state() {
  const bits = new Uint8Array(Math.ceil(mask.length / 8));
  mask.forEach((bit, i) => { bits[i >> 3] |= bit << (i & 7); });
  return { picture, mask: text64(bits), method, chains: $("chains").value, steps: $("steps").value, noise: $("noise").value, seed: again };
}

export function restore(given) {
  const bits = bytes(given.mask), [height, width] = size(run);
  if (bits.length !== Math.ceil(height * width / 8)) throw new Error("a mask of another size");
  reset();
  lists(); takes();
  picture = String(given.picture);
  mask = Uint8Array.from({ length: height * width }, (_, i) => (bits[i >> 3] >> (i & 7)) & 1);
  past = []; future = [];
  for (const id of ["chains", "steps", "noise"]) $(id).value = String(given[id]);
  results(Number($("chains").value) || 1);
  fillBy(given.method === "draws" ? "draws" : "ascent");
  again = Number.isInteger(given.seed) ? given.seed : null;
  choices();
  show();
}

/** The image and the mask that are shown. */
export const current = () => (run ? { picture, mask } : {});

export const leave = () => abort?.abort();

/** Nothing of an ascent is left: neither pictures nor words, nor anything to save. */
function reset() {
  abort?.abort();
  abort = null;
  films();
  frames = []; marked = film = null; held = false;
  delete $("results").dataset.frames;
  original(null);
  results(Number($("chains").value) || 1);
  plot.show([]);
  $("progress").textContent = "";
  note("inpaint-note", "");
  busy(false);
}

async function choices() {
  const fresh = lists(), from = source;
  $("upload").hidden = source !== "upload";
  $("choices").hidden = $("others").hidden = source === "upload";
  if (from === "upload") return note("choices-note", "");
  if (from === "test" && run.data) { $("choices").replaceChildren(); return note("choices-note", `No test images: ${run.data}`, true); }
  note("choices-note", "Loading …");
  const n = 24;
  try {
    const found = from === "test"
      ? await get(`/api/runs/${run.id}/pictures`, { first: page * n, n })
      : await get(`/api/runs/${run.id}/samples`, { n, seed: page });
    if (!fresh()) return;
    if (!found.pictures.length && page) { page = 0; return choices(); }
    fill($("choices"), found.pictures.map((each, i) => thumbnail(run, each, `${from === "test" ? "test image" : "sample"} ${page * n + i + 1}`, take)));
    note("choices-note", !found.pictures.length ? "There are no images here." : run.data ? `These are samples, because the test images are missing: ${run.data}` : "");
    if (!picture && found.pictures.length) take($("choices").firstChild, found.pictures[0]);
  } catch (error) { if (fresh()) sorry("choices-note", error, choices); }
}

function take(button, chosen) {
  takes();
  reset();
  picture = chosen;
  press($("choices"), button);
  show();
}

async function upload() {
  const fresh = takes(), { name } = file;
  note("choices-note", `Reading ${name} …`);
  try {
    const found = await send(`/api/runs/${run.id}/upload`, await modest(file, studio.limits), { inverted: $("upload-invert").checked });
    if (!fresh()) return;
    take(null, found.picture);
    note("choices-note", `${name}, as the model sees it.`);
  } catch (error) { if (fresh()) sorry("choices-note", error); }
}

async function masks() {
  const [height, width] = size(run), fresh = stencils();
  const made = await Promise.allSettled(studio.masks.map((name) => get(`/api/runs/${run.id}/mask`, { name })));
  if (!fresh()) return;
  if (made.some(({ reason }) => reason?.status === 0)) whenBack("masks", masks);
  fill($("masks"), made.flatMap(({ value }, i) => {
    if (!value) return [];
    const bits = bytes(value.mask), name = studio.masks[i].replace(":", " ").replace("-", " ") + (studio.masks[i].startsWith("random") ? " %" : "");
    const canvas = el("canvas", { width, height }), image = new ImageData(width, height);
    bits.forEach((bit, k) => image.data.set(bit ? [184, 47, 69, 255] : [0, 0, 0, 0], 4 * k));
    canvas.getContext("2d").putImageData(image, 0, 0);
    const button = el("button", { type: "button", title: `hide ${name}`, ariaLabel: `hide ${name}` }, canvas);
    button.addEventListener("click", () => change((_, k) => bits[k]));
    return [button];
  }));
}

// The easel: a picture below, what is hidden above it.

function easel() {
  const canvas = $("mask");
  const at = (event) => {
    const frame = canvas.getBoundingClientRect(), [height, width] = size(run);
    const clip = (value, most) => Math.min(most - 1, Math.max(0, Math.floor(value * most)));
    return { x: clip((event.clientX - frame.left) / frame.width, width), y: clip((event.clientY - frame.top) / frame.height, height) };
  };
  let last = null, before = null, first = null; // where the stroke is, what was hidden before it, and where it began
  canvas.addEventListener("pointerdown", (event) => {
    if (!picture || event.button || !event.isPrimary) return;
    abort?.abort();
    canvas.setPointerCapture(event.pointerId);
    last = first = at(event);
    remember();
    before = mask.slice();
    stroke(last, last, first, before);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!last) return;
    const next = at(event);
    stroke(last, next, first, before);
    last = next;
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { last = null; });
  canvas.addEventListener("keydown", (event) => {
    const [height, width] = size(run);
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (move) cursor = { x: Math.min(width - 1, Math.max(0, cursor.x + move[0])), y: Math.min(height - 1, Math.max(0, cursor.y + move[1])) };
    else if (event.key === " " || event.key === "Enter") mark();
    else if (event.key === "Backspace" || event.key === "Delete") dab(0);
    else if (event.key === "Escape" && corner) corner = null;
    else return;
    event.preventDefault();
    show();
  });
  for (const each of ["focus", "blur"]) canvas.addEventListener(each, () => show());
}

/** What space does where the cursor is: a spot, or one corner of a rectangle and then the other. */
function mark() {
  if (!picture) return;
  if (tool !== "rectangle") return dab(tool === "eraser" ? 0 : 1);
  if (!corner) { corner = cursor; return; }
  abort?.abort();
  remember();
  stroke(corner, cursor, corner, mask.slice());
  corner = null;
}

function dab(bit) {
  if (!picture) return;
  abort?.abort();
  remember();
  spot(cursor, bit);
}

function stroke(from, to, first, before) {
  if (tool === "rectangle") {
    const [, width] = size(run), [x0, x1] = [first.x, to.x].sort((a, b) => a - b), [y0, y1] = [first.y, to.y].sort((a, b) => a - b);
    mask.set(before);
    for (let y = y0; y <= y1; y++) mask.fill(1, y * width + x0, y * width + x1 + 1);
  } else {
    const steps = Math.max(1, Math.abs(to.x - from.x), Math.abs(to.y - from.y));
    for (let i = 0; i <= steps; i++) spot({ x: Math.round(from.x + (to.x - from.x) * i / steps), y: Math.round(from.y + (to.y - from.y) * i / steps) }, tool === "eraser" ? 0 : 1);
  }
  show();
}

function spot({ x, y }, bit) {
  const [height, width] = size(run), radius = (Number($("brush").value) - 1) / 2 + 0.1, reach = Math.ceil(radius);
  for (let v = Math.max(0, y - reach); v <= Math.min(height - 1, y + reach); v++)
    for (let u = Math.max(0, x - reach); u <= Math.min(width - 1, x + reach); u++)
      if (Math.hypot(u - x, v - y) <= radius) mask[v * width + u] = bit;
}

function change(rule) {
  if (!mask) return;
  abort?.abort();
  remember();
  mask = mask.map(rule);
  show();
}

/** Keep the mask as it is now, to come back to. */
function remember() {
  past = [...past.slice(-99), mask.slice()];
  future = [];
}

/** One mask back, or forth again. */
function step(from, to) {
  if (!from.length) return;
  abort?.abort();
  to.push(mask);
  mask = from.pop();
  show();
}

function show() {
  if (!run) return;
  const [height, width] = size(run), canvas = $("mask"), zoom = Math.max(2, Math.floor(560 / Math.max(height, width)));
  if (picture) paint($("original"), run, picture);
  canvas.width = width * zoom;
  canvas.height = height * zoom;
  const pen = canvas.getContext("2d");
  pen.fillStyle = hatch(zoom);
  mask.forEach((bit, i) => { if (bit) pen.fillRect((i % width) * zoom, Math.floor(i / width) * zoom, zoom, zoom); });
  if (document.activeElement === canvas && canvas.matches(":focus-visible")) {
    for (const [line, width] of [["#000", 7], ["#fff", 3]]) for (const { x, y } of corner ? [corner, cursor] : [cursor]) {
      Object.assign(pen, { strokeStyle: line, lineWidth: width });
      pen.strokeRect(x * zoom + 1, y * zoom + 1, Math.max(4, zoom - 2), Math.max(4, zoom - 2));
    }
  }
  const count = mask.reduce((sum, bit) => sum + bit, 0);
  $("hidden-count").textContent = corner ? "One corner is set. Press space to set the other." : count ? `${count} of ${mask.length} pixels hidden` : "Nothing is hidden yet.";
  $("go").disabled = !picture || !count;
  $("undo").disabled = !past.length;
  $("redo").disabled = !future.length;
  if (picture) paint($("truth-picture"), run, marked?.picture ?? picture);
}

function hatch() {
  const tile = el("canvas", { width: 12, height: 12 }), pen = tile.getContext("2d");
  pen.fillStyle = "#b82f45";
  pen.fillRect(0, 0, 12, 12);
  pen.strokeStyle = "#d8596c";
  pen.lineWidth = 2;
  for (const shift of [-12, 0, 12]) { pen.beginPath(); pen.moveTo(shift, 12); pen.lineTo(shift + 12, 0); pen.stroke(); }
  return pen.createPattern(tile, "repeat");
}

// The ascent.

function results(count) {
  columns(count);
  chains = Array.from({ length: count }, (_, i) => {
    const canvas = el("canvas"), words = el("figcaption", {}, "–");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `filling ${i + 1}`);
    return { canvas, words, figure: el("figure", {}, canvas, words), points: [] };
  });
  $("results").replaceChildren(...chains.map((each) => each.figure));
}

/** The words below the original, and no spread yet. */
function original(truth) {
  $("truth-words").textContent = truth === null ? "original" : `original, ${nats(truth)}`;
  $("spread").hidden = true;
}

/** While a filling or the button is held, the original stands in the place of every filling. */
function holding() {
  const hold = (on) => {
    if (!frames.length || held === on) return;
    held = on;
    chains.forEach(({ canvas }, i) => paint(canvas, run, on ? marked.picture : frames.at(-1).pictures[i]));
  };
  for (const each of [$("results"), $("hold")]) each.addEventListener("pointerdown", (event) => { if (!event.button && event.target.matches("canvas, button")) hold(true); });
  for (const each of ["pointerup", "pointercancel"]) addEventListener(each, () => hold(false));
  $("hold").addEventListener("keydown", (event) => { if (event.key === " " || event.key === "Enter") { event.preventDefault(); hold(true); } });
  for (const each of ["keyup", "blur"]) $("hold").addEventListener(each, () => hold(false));
}

const columns = (count) => $("results").style.setProperty("--columns", count === 1 ? 1 : count <= 4 ? 2 : 4);

/** The place that so many chains will take; a result that is shown stays as far as it fits. */
function arrange(count) {
  if (!frames.length) return results(count);
  columns(count);
  const empty = Math.max(0, count - chains.length);
  $("results").replaceChildren(...chains.slice(0, count).map((each) => each.figure), ...Array.from({ length: empty }, () => el("figure", {}, el("canvas"), el("figcaption", {}, "–"))));
}

async function go() {
  const steps = number($("steps"), "inpaint-note", "Steps");
  const noise = steps === null ? null : number($("noise"), "inpaint-note", "Noise", false);
  if (noise === null) return $(steps === null ? "steps" : "noise").focus();
  abort?.abort();
  films();
  const mine = abort = new AbortController();
  const ask = {
    picture, mask: text64(mask), method, chains: Number($("chains").value), steps, noise,
    seed: frames.length || again === null ? Math.floor(Math.random() * 2 ** 31) : again,
  };
  again = ask.seed;
  results(ask.chains);
  frames = []; held = false;
  marked = { picture, mask: mask.slice() };
  original(null);
  let truth = null, began = performance.now();
  busy(true);
  note("inpaint-note", "");
  $("progress").textContent = "starting …";
  try {
    await follow(`/api/runs/${run.id}/inpaint`, ask, (name, data) => {
      if (mine.signal.aborted || abort !== mine) return;
      if (name === "start") { truth = data.truth_nats; film = data.film; began = performance.now(); original(truth); }
      if (name === "frame") frame(data, truth, ask, began);
      if (name === "error") throw new Error(data.error);
    }, mine.signal);
    if (abort !== mine) return;
    if (ask.method === "draws") return differ(frames.at(-1));
    const best = Math.max(...frames.at(-1).nats);
    note("inpaint-note", `The best chain ends ${Math.abs(best - truth).toFixed(1)} nats ${best > truth ? "above" : "below"} the original.`);
  } catch (error) {
    if (abort !== mine) return;
    if (mine.signal.aborted) note("inpaint-note", frames.length ? "Stopped. “Again” starts over from new noise." : "");
    else sorry("inpaint-note", error, () => note("inpaint-note", "The server is back. “Again” starts over from new noise."));
    $("progress").textContent = frames.length ? `${mine.signal.aborted ? "stopped" : "cut off"} at step ${frames.at(-1).step} of ${steps}` : "";
  } finally {
    if (abort === mine) { abort = null; busy(false); }
  }
}

/** The step and the nats of its chains, four to a line. */
function tip(i, series) {
  const values = series.map((each) => each.points[i]?.[1]?.toFixed(1) ?? "–"), lines = [];
  for (let k = 0; k < values.length; k += 4) lines.push(values.slice(k, k + 4).join("  "));
  return `step ${series[0].points[i][0]}, nats\n${lines.join("\n")}`;
}

/** How much exact draws differ, and whether their chains agree. */
function differ({ spread, r_hat }) {
  const most = Math.max(...spread);
  heat($("spread-picture"), run, spread, most);
  $("spread-words").textContent = `spread: sd up to ${(100 * most).toFixed(0)}\u00a0% of white`;
  $("spread").hidden = false;
  const agree = r_hat !== null && r_hat < 1.1;
  note("inpaint-note", `Draws from the model, given what is visible. ${r_hat === null ? "Too few steps to tell whether the chains agree." : `R̂ = ${r_hat.toFixed(2)}: ${agree ? "the chains agree." : "the chains do not agree yet, so increase the steps before you trust the spread."}`}`);
}

function frame(data, truth, { steps, method }, began) {
  frames.push(data);
  const best = method === "ascent" ? data.nats.indexOf(Math.max(...data.nats)) : -1;
  chains.forEach((chain, i) => {
    if (!held) paint(chain.canvas, run, data.pictures[i]);
    chain.words.textContent = nats(data.nats[i]);
    chain.figure.classList.toggle("best", chains.length > 1 && i === best);
    chain.points.push([data.step, data.nats[i]]);
  });
  const series = chains.map(({ points }, i) => ({ points, look: i === best ? "accent" : "quiet" }));
  plot.show(series, truth === null ? [] : [{ y: truth, name: "the original", look: "dashed" }], { x: [0, steps] });
  const seconds = (performance.now() - began) / 1000;
  $("progress").textContent = `step ${data.step} of ${steps}${seconds > 0.5 ? `, ${(frames.length / seconds).toFixed(0)} frames/s` : ""}`;
  $("results").dataset.frames = frames.length;
}

function busy(on) {
  if (!on && document.activeElement === $("stop")) $("go").focus();
  $("stop").disabled = !on;
  $("go").textContent = on || frames.length ? "Again" : "Fill in";
  $("hold").disabled = !frames.length;
  $("save-png").disabled = $("save-gif").disabled = on || !frames.length;
}

function savePng() {
  const [height, width] = size(run), zoom = Math.max(1, Math.ceil(160 / width)), gap = 8, last = frames.at(-1);
  const sheet = el("canvas", { width: (width * zoom + gap) * (last.pictures.length + 1) - gap, height: height * zoom });
  const pen = sheet.getContext("2d");
  pen.imageSmoothingEnabled = false;
  const hidden = paint(el("canvas"), run, marked.picture), cover = hidden.getContext("2d");
  cover.fillStyle = "#b82f45";
  marked.mask.forEach((bit, i) => { if (bit) cover.fillRect(i % width, Math.floor(i / width), 1, 1); });
  [hidden, ...last.pictures.map((each) => paint(el("canvas"), run, each))].forEach((each, i) => pen.drawImage(each, i * (width * zoom + gap), 0, width * zoom, height * zoom));
  sheet.toBlob((content) => download(content, "inpainted.png"));
}

async function saveGif() {
  if (waiting($("save-gif"))) return;
  const fresh = films();
  waits($("save-gif"), true);
  note("inpaint-note", "Making the GIF …");
  try {
    const content = await blob(`/api/runs/${run.id}/film`, { id: film });
    if (fresh()) { download(content, "inpainted.gif"); note("inpaint-note", "The GIF is saved."); }
  } catch (error) { if (fresh()) sorry("inpaint-note", error); }
  waits($("save-gif"), false);
}
