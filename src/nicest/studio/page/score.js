// The log-density of images, term by term, and its place among those of held-out images.
import { follow, get, latest, post, send } from "./api.js";
import { $, dropping, el, heat, minus, modest, note, paint, Plot, size, sorry, svg, waiting, waits } from "./draw.js";

const runs = latest(), references = latest();
let here = runs(); // whether the run is still the one that was asked for
let studio, run = null, plot, quantiles = [], shown = [], drawn = false, timer = 0, last = [];
const NAMES = { validation: "validation images, which the model was not trained on", training: "images the model was trained on" };

export function setup(given) {
  studio = given;
  plot = new Plot("reference-scores", { x: "log-likelihood, nats", y: null });
  dropping($("score-drop"), $("score-file"), files);
  $("score-invert").addEventListener("change", () => { if (last.length) { shown = shown.filter((each) => !last.includes(each.file)); files(last); } });
  $("score-tests").addEventListener("click", () => some("pictures", "test image"));
  $("score-samples").addEventListener("click", () => some("samples", "sample"));
  $("score-sketch").addEventListener("click", sketched);
  $("clear-sketch").addEventListener("click", clear);
  sketching();
}

export function choose() {
  clearTimeout(timer);
  references();
  here = runs();
  run = null; shown = []; quantiles = []; last = [];
  plot.show([]);
  cards();
  for (const id of ["score-note", "reference-note"]) note(id, "");
  $("caveat").textContent = "";
}

/** The images that are scored, by their pictures. */
export const state = () => ({ images: shown.slice(0, studio.limits.pictures).map(({ name, picture }) => ({ name, picture })) });

export function restore({ images }) {
  const given = images.slice(0, studio.limits.pictures).map(({ name, picture }) => ({ name: String(name), picture: String(picture) }));
  shown = [];
  if (given.length) scoring((still) => score(given, still));
}

export async function enter(chosen) {
  if (run === chosen) return;
  run = chosen;
  clear();
  $("score-tests").disabled = Boolean(run.data);
  await reference();
}

/** The scores of held-out images; of a large model they are counted for a while, and asked for again. */
async function reference() {
  const fresh = references();
  clearTimeout(timer);
  try {
    const found = await get(`/api/runs/${run.id}/reference-scores`);
    if (!fresh()) return;
    quantiles = found.quantiles;
    note("reference-note", found.counting ? "Scoring the validation images for comparison. You can score yours meanwhile …" : quantiles.length ? `The histogram shows the scores of ${NAMES[found.reference]}.` : "The data of this run is gone, so scores cannot be compared.");
    if (found.counting) timer = setTimeout(reference, 3000);
    density();
  } catch (error) { if (fresh()) sorry("reference-note", error, reference); }
}

async function files(given) {
  note("score-note", `Reading ${given.length === 1 ? given[0].name : `${given.length} files`} …`);
  const taken = [], failed = [], still = here;
  last = given.slice(0, studio.limits.pictures);
  for (const file of last) {
    try {
      const { picture } = await send(`/api/runs/${run.id}/upload`, await modest(file, studio.limits), { inverted: $("score-invert").checked });
      taken.push({ name: file.name, picture, file });
      studio.own.push({ name: file.name, picture });
    } catch (error) {
      if (!still()) return;
      if (error.status === 0) return sorry("score-note", error);
      failed.push(`${file.name}: ${error.message}`);
    }
    if (!still()) return;
  }
  if (given.length > studio.limits.pictures) failed.push(`only the first ${studio.limits.pictures} files were read`);
  try { if (taken.length) await score(taken, still); } catch (error) { failed.push(error.message); }
  if (still()) note("score-note", failed.join(" · "), failed.length > 0);
}

async function some(kind, name) {
  const start = Math.floor(Math.random() * 100);
  const given = kind === "pictures" ? { first: start, n: 3 } : { n: 3, seed: Math.floor(Math.random() * 1e6) };
  await scoring(async (still) => {
    const found = await get(`/api/runs/${run.id}/${kind}`, given);
    if (still()) await score(found.pictures.map((picture, i) => ({ name: kind === "pictures" ? `${name} ${start + i + 1}` : name, picture })), still);
  });
}

/** Do some work for scores of this run, and say that it goes on. */
async function scoring(work) {
  const still = here;
  note("score-note", "Scoring …");
  try {
    await work(still);
    if (still()) note("score-note", "");
  } catch (error) { if (still()) sorry("score-note", error); }
}

async function score(given, still) {
  note("score-note", "Scoring …");
  const found = await post(`/api/runs/${run.id}/score`, { pictures: given.map((each) => each.picture) });
  if (!still()) return;
  $("caveat").textContent = (found.draws > 1 ? `Each score is a mean over ${found.draws} draws of dequantisation noise, ± its standard error. It is a lower bound on the log-probability of the image. ` : "") + found.caveat;
  shown = [...given.map((each, i) => ({ ...each, ...found.scores[i], unit: found.unit, reference: found.reference })), ...shown].slice(0, 24);
  cards();
  density();
}

function cards() {
  $("scores").replaceChildren(...(shown.length ? shown.map(card) : [el("p", { className: "empty" }, "No scores yet. Drop an image, draw one, or start from an example.")]));
}

function card(each) {
  const numbers = el("div", { className: "numbers" },
    el("div", {}, el("b", {}, each.nats === null ? "not finite" : minus(each.nats.toFixed(1))), el("span", {}, `${each.nats_error ? `± ${each.nats_error.toFixed(1)} ` : ""}${each.unit}`)),
    el("div", {}, el("b", {}, each.bits_per_dim === null ? "–" : minus(each.bits_per_dim.toFixed(3))), el("span", {}, "bits/dim")));
  const picture = paint(el("canvas", { className: "picture" }), run, each.picture);
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", each.name);
  const where = el("button", { type: "button", title: "Shows, for every pixel, how many nats less likely it is than the model expects, given all the others." }, "Surprise map");
  where.addEventListener("click", () => surprising(each, where));
  where.hidden = !run.levels || Boolean(each.map);
  const beside = el("div", { className: "beside" }, picture, where, ...(each.map ? [each.map] : []));
  return el("article", { className: "card" }, beside, el("div", {}, el("h3", {}, each.name), numbers, ledger(each.terms), el("p", { className: "place" }, place(each.denser_share, each.reference))));
}

/** Where the image is surprising: the map grows as its pixels are scored. */
async function surprising(each, button) {
  if (waiting(button) || each.map) return;
  const still = here, [height, width] = size(run), excess = new Float64Array(height * width);
  const canvas = el("canvas", { className: "picture" }), words = el("figcaption", {}, "scoring …");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `where ${each.name} is surprising`);
  const map = el("figure", { className: "map" }, heat(canvas, run, excess, 1), words);
  waits(button, true);
  button.after(map);
  try {
    await follow(`/api/runs/${run.id}/surprise`, { picture: each.picture }, (name, data) => {
      if (!still() || name !== "frame") return;
      data.pixels.forEach((pixel, i) => { excess[pixel] += data.excess[i]; });
      const most = Math.max(1, ...excess);
      heat(canvas, run, excess, most);
      words.textContent = `up to ${most.toFixed(1)} nats above what is expected of a pixel`;
    });
    each.map = map;
  } catch (error) { if (still()) { map.remove(); sorry("score-note", error); } }
  waits(button, false);
  button.hidden = Boolean(each.map);
}

function place(share, reference) {
  if (share === null) return "";
  if (share > 0.999) return `Nearly every ${reference} image is denser: the model finds this one unlikely.`;
  if (share < 0.001) return `Denser than nearly every ${reference} image.`;
  return `${(100 * share).toFixed(share > 0.99 || share < 0.01 ? 1 : 0)} % of the ${reference} images are denser.`;
}

/** The terms that the log-density is the sum of, as bars around zero; those that are zero are one line. */
function ledger(terms) {
  const given = Object.entries(terms), real = given.filter(([, value]) => value !== 0);
  const most = Math.max(...real.map(([, value]) => Math.abs(value)), 1e-9), box = el("div", { className: "ledger" });
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "terms of the log-density");
  for (const [name, value] of real) {
    const wide = 50 * Math.abs(value ?? 0) / most;
    const bar = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: value < 0 ? "down" : "up", x: value < 0 ? 50 - wide : 50, y: 1, width: wide, height: 8 }), svg("line", { class: "zero", x1: 50, x2: 50, y1: 0, y2: 10, "stroke-width": 0.4 }));
    box.append(el("span", {}, name), bar, el("b", {}, value === null ? "not finite" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`));
  }
  const zero = given.length - real.length;
  if (zero) box.append(el("span", {}, "other layers"), el("span", {}, `${zero}, volume-preserving`), el("b", {}, "0"));
  return box;
}

/** The held-out images as a histogram of equal shares, and a line for each score. */
function density() {
  if (!quantiles.length) return;
  const bars = 40, low = quantiles[1], high = quantiles.at(-1), width = (high - low) / bars || 1;
  const share = (x) => { const i = quantiles.findIndex((q) => q > x); if (i <= 0) return i < 0 ? 1 : 0; return (i - 1 + (x - quantiles[i - 1]) / (quantiles[i] - quantiles[i - 1] || 1)) / (quantiles.length - 1); };
  const points = [[low, 0]];
  for (let k = 0; k < bars; k++) { const y = share(low + (k + 1) * width) - share(low + k * width); points.push([low + k * width, y], [low + (k + 1) * width, y]); }
  points.push([high, 0]);
  const left = low - 0.12 * (high - low), right = high + 0.08 * (high - low);
  const marks = shown.filter((each) => each.nats !== null).map((each, i) => ({ x: Math.min(right, Math.max(left, each.nats)), look: i ? "quiet" : "accent" }));
  if (marks.length) marks[0].name = shown[0].nats < left ? "last score, further left" : "last score";
  plot.show([{ points, area: true }], marks.reverse(), { x: [left, right], y: [0, 1.1 * Math.max(...points.map((each) => each[1]))] });
}

// Drawing with the pointer: light on dark, as the images of the paper are.

function clear() {
  const pen = $("sketch").getContext("2d");
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, 280, 280);
  drawn = false;
}

function sketching() {
  const canvas = $("sketch"), pen = canvas.getContext("2d");
  let before = null;
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [280 * (event.clientX - box.left) / box.width, 280 * (event.clientY - box.top) / box.height]; };
  const line = (from, to) => {
    Object.assign(pen, { strokeStyle: "#fff", lineWidth: 28, lineCap: "round" });
    pen.beginPath(); pen.moveTo(...from); pen.lineTo(...to); pen.stroke();
    drawn = true;
  };
  canvas.addEventListener("pointerdown", (event) => { if (event.button || !event.isPrimary) return; canvas.setPointerCapture(event.pointerId); before = at(event); line(before, before); });
  canvas.addEventListener("pointermove", (event) => { if (before) { const next = at(event); line(before, next); before = next; } });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { before = null; });
}

async function sketched() {
  if (!drawn) return note("score-note", "Draw something first.");
  const content = await new Promise((done) => $("sketch").toBlob(done));
  await scoring(async (still) => {
    const { picture } = await send(`/api/runs/${run.id}/upload`, content);
    if (!still()) return;
    studio.own.push({ name: `drawing ${studio.own.length + 1}`, picture });
    await score([{ name: "a drawing", picture }], still);
  });
}
