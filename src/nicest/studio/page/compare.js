// Two runs side by side: their likelihood, their samples, and how they fill in the same gap.
import { follow, get, latest, post } from "./api.js";
import { $, el, nats, note, paint, Plot, size, sorry, table, text64, waiting, waits } from "./draw.js";
import * as inpaint from "./inpaint.js";

const SIDES = ["first", "second"], CHAINS = 2, IMAGES = 16;
const pairs = latest(), curves = latest(), fillings = latest();
let studio, run = null, other = null, plot, abort = null;

export function setup(given) {
  studio = given;
  plot = new Plot("compare-curves", { x: "epoch", y: "nats", floor: 0.05, tip: (i, series) => `epoch ${series[0].points[i][0]}\n${series.map((each) => `${each.name} ${nearest(each, series[0].points[i][0])}`).join("\n")}` });
  $("other-run").addEventListener("change", () => pair($("other-run").value));
  $("fill-both").addEventListener("click", fillBoth);
}

const nearest = ({ points }, x) => { const found = points.findLast((each) => each[0] <= x); return found && Number.isFinite(found[1]) ? found[1].toFixed(2) : "–"; };
const others = () => studio.runs.filter((each) => each.ready && each.id !== run?.id);
const alike = () => run.kind === "images" && other.kind === "images" && String([run.shape, run.levels]) === String([other.shape, other.levels]);

export function choose() {
  for (const each of [pairs, curves, fillings]) each();
  abort?.abort();
  run = null;
}

export const state = () => ({ other: other?.id });

export function restore(given) { if (others().some((each) => each.id === given.other)) pair(given.other); }

export function leave() { abort?.abort(); }

export function enter(chosen) {
  const before = other?.id;
  if (run === chosen && others().some((each) => each.id === before)) return;
  run = chosen;
  const found = others();
  $("other-run").replaceChildren(...found.map((each) => el("option", { value: each.id }, each.name)));
  pair(found.find((each) => each.id === before)?.id ?? (found.find((each) => each.form === run.form) ?? found[0])?.id);
}

function pair(id) {
  for (const each of [pairs, curves, fillings]) each();
  abort?.abort();
  other = studio.runs.find((each) => each.id === id);
  for (const name of ["compare-note", "same-note", "both-note"]) note(name, "");
  plot.show([]);
  $("same").replaceChildren();
  $("compare-parts").hidden = !other || !run.ready;
  if (!other || !run.ready) return note("compare-note", "There is no other model to compare with: serve two runs, or train one.", true);
  $("other-run").value = id;
  $("same-part").hidden = $("both-part").hidden = !alike();
  if (!alike()) note("compare-note", run.kind === other.kind ? "" : "These models were trained on different data, so only their curves and samples are shown.");
  SIDES.forEach((side, i) => { $(`${side}-name`).textContent = [run, other][i].name; samples(side, [run, other][i]); });
  learned();
  if (alike()) { same(); gap(); }
}

async function learned() {
  const fresh = curves();
  try {
    const found = await Promise.all([run, other].map((each) => get(`/api/runs/${each.id}/metrics`)));
    if (!fresh()) return;
    plot.show(found.map(({ rows }, i) => ({ name: [run, other][i].name, look: i ? "" : "accent", points: rows.map((row) => [row.epoch, row.valid_nats ?? NaN]) })));
  } catch (error) { if (fresh()) sorry("compare-note", error, learned); }
}

async function samples(side, from) {
  const box = $(`${side}-samples`), still = () => from === (side === "first" ? run : other);
  box.replaceChildren();
  try {
    const content = from.kind === "images"
      ? el("div", { className: "wall big plain" }, ...(await get(`/api/runs/${from.id}/samples`, { n: 32 })).pictures.map((each) => paint(el("canvas"), from, each)))
      : await get(`/api/runs/${from.id}/rows`, { n: 8 }).then((found) => table(found.columns, found.rows));
    if (still()) box.replaceChildren(content);
  } catch (error) { if (still()) sorry("compare-note", error, () => samples(side, from)); }
}

/** The same test images, scored by both; in the units of levels, which do not depend on the interval of a recipe. */
async function same() {
  const fresh = pairs(), with_data = [run, other].find((each) => !each.data);
  if (!with_data) return note("same-note", "The data of both runs is missing, so there are no test images to score.");
  note("same-note", "Scoring …");
  try {
    const { pictures } = await get(`/api/runs/${with_data.id}/pictures`, { n: IMAGES });
    const found = await Promise.all([run, other].map((each) => post(`/api/runs/${each.id}/score`, { pictures })));
    if (!fresh()) return;
    const values = found.map(({ scores }) => scores.map((each) => each.level_nats)), mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;
    const gaps = values[0].map((each, i) => each - values[1][i]), error = Math.sqrt(mean(gaps.map((each) => (each - mean(gaps)) ** 2)) / (gaps.length - 1)), ahead = gaps.filter((each) => each > 0).length;
    $("same").replaceChildren(table(["model", "mean log-likelihood, nats", "bits/dim", "better on"], [run, other].map((each, i) => [each.name, Number(mean(values[i]).toFixed(1)), Number(mean(found[i].scores.map((score) => score.bits_per_dim)).toFixed(3)), `${i ? gaps.length - ahead : ahead} of ${gaps.length}`])));
    const gain = mean(gaps);
    note("same-note", `The first ${gaps.length} test images of ${with_data.name}. ${gain > 0 ? run.name : other.name} gives them ${Math.abs(gain).toFixed(1)} ± ${error.toFixed(1)} nats more, in nats of the levels.`);
  } catch (error) { if (fresh()) sorry("same-note", error, same); }
}

/** What both will fill in: the image and the mask of the view Inpaint, where there is one. */
async function gap() {
  const fresh = fillings(), [height, width] = size(run);
  let { picture, mask } = inpaint.current();
  try {
    if (!picture) ({ pictures: [picture] } = await get(`/api/runs/${run.id}/${run.data ? "samples" : "pictures"}`, { n: 1 }));
    if (!fresh()) return;
    mask ??= inpaint.lowerHalf(height, width);
    const canvas = paint($("both-original"), run, picture), pen = canvas.getContext("2d");
    pen.fillStyle = "#b82f45";
    mask.forEach((bit, i) => { if (bit) pen.fillRect(i % width, Math.floor(i / width), 1, 1); });
    Object.assign(canvas.dataset, { mask: text64(mask) });
    for (const side of SIDES) $(`${side}-filled`).replaceChildren(...Array.from({ length: CHAINS }, () => el("figure", {}, el("canvas"), el("figcaption", {}, "–"))));
    $("fill-both").disabled = !mask.some(Boolean);
  } catch (error) { if (fresh()) sorry("both-note", error, gap); }
}

async function fillBoth() {
  if (waiting($("fill-both"))) return;
  const fresh = fillings(), { picture, mask } = $("both-original").dataset, mine = abort = new AbortController(), ends = [];
  waits($("fill-both"), true);
  note("both-note", "Filling in …");
  const one = (side, from) => follow(`/api/runs/${from.id}/inpaint`, { picture, mask, chains: CHAINS, steps: 500 }, (name, data) => {
    if (!fresh()) return;
    if (name === "error") throw new Error(data.error);
    if (name === "start") ends.push(`${from.name} gives the original ${nats(data.truth_nats)}`);
    if (name === "frame") [...$(`${side}-filled`).children].forEach((figure, i) => { paint(figure.firstChild, from, data.pictures[i]); figure.lastChild.textContent = `${from.name}: ${nats(data.nats[i])}`; });
  }, mine.signal);
  try {
    await Promise.all([one("first", run), one("second", other)]);
    const apart = String(run.interval) === String(other.interval) ? "" : " They measure nats on different intervals, so do not compare them.";
    if (fresh()) note("both-note", `${ends.sort().join("; ")}.${apart}`);
  } catch (error) { if (fresh() && !mine.signal.aborted) sorry("both-note", error); }
  waits($("fill-both"), false);
}
