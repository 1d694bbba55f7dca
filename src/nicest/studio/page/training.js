// The likelihood of a run over its epochs, while it trains too, and the spectrum of its scaling layer.
import { blob, get, latest, post } from "./api.js";
import { $, download, el, minus, note, paint, Plot, sorry, table, waiting, waits } from "./draw.js";

const polls = latest(), spectra = latest(), draws = latest();
let studio, run = null, name = "", rows = [], curves, spectrum, timer = 0;

export function setup(given) {
  studio = given;
  const value = (each) => (Number.isFinite(each) ? each.toFixed(2) : "–");
  curves = new Plot("curves", { x: "epoch", y: "nats", floor: 0.05, tip: (i, [train, valid]) => `epoch ${train.points[i][0]}\ntraining ${value(train.points[i][1])}\nvalidation ${value(valid.points[i][1])}` });
  $("halt").addEventListener("click", halt);
  $("fetch").addEventListener("click", keep);
  spectrum = new Plot("spectrum", { x: "component, from the largest", y: "sd", tip: (i, series) => `component ${i + 1}\n${series.map((each) => `${each.name} ${each.points[i]?.[1].toPrecision(4)}`).join("\n")}` });
}

export function choose(chosen) {
  leave();
  spectra();
  draws();
  for (const id of ["halt", "fetch", "growing", "growing-title"]) $(id).hidden = true;
  if (name !== chosen.id) { rows = []; curves.show([]); note("curves-note", ""); }
  run = null;
  name = chosen.id;
  spectrum.show([]);
  note("spectrum-note", "");
}

export function leave() { clearTimeout(timer); polls(); }

export function enter(chosen) {
  if (run !== chosen) {
    run = chosen;
    $("spectrum-pane").hidden = run.kind === "table"; // it has no latent space
    if (run.ready) { if (run.kind !== "table") components(); samples(); }
    else note("spectrum-note", "The spectrum appears with the first model.");
  }
  poll();
}

async function poll() {
  clearTimeout(timer);
  const fresh = polls();
  let wait = 10_000;
  try {
    const found = await get(`/api/runs/${run.id}/metrics`, { after: rows.at(-1)?.step ?? -1 });
    if (!fresh()) return;
    rows.push(...found.rows);
    if (found.rows.length) { draw(found.best_epoch); if (run.ready) samples(); }
    const { here, running, failed } = found.process, live = here ? running : found.idle_seconds !== null && found.idle_seconds < 60;
    if (live || !run.ready) wait = 2000;
    $("halt").hidden = !running;
    $("fetch").hidden = !run.ready;
    note("curves-note", state(found, live), failed || (run.ready && found.idle_seconds === null));
    if (!run.ready || found.idle_seconds === null) studio.refresh();
  } catch (error) {
    if (!fresh()) return;
    sorry("curves-note", error, () => { if (fresh()) poll(); });
    wait = 5000;
  }
  timer = setTimeout(poll, wait);
}

function state(found, live) {
  const last = rows.at(-1), all = found.epochs, nats = (row) => (Number.isFinite(row?.valid_nats) ? minus(row.valid_nats.toFixed(2)) : "–");
  const { here, running, failed, said } = found.process;
  if (failed) return `Training failed: ${said.replace("error: ", "")}`;
  if (running && !last) return `Training has started. The first figures appear after the first validation. ${minus(said)}`;
  if (run.ready && found.idle_seconds === null) return `The record of this training is missing: expected metrics.jsonl in the folder of ${run.name}.`;
  if (!last) return "No figures yet. The first appear after the first validation.";
  const best = found.best_epoch ? ` The best model is that of epoch ${found.best_epoch}: ${nats(rows.find((row) => row.epoch === found.best_epoch))} nats on validation.` : "";
  if (found.finished && last.epoch < all) return `Training is done. It stopped early, at epoch ${last.epoch}, after ${found.patience} epochs without a better model.${best}`;
  if (found.finished) return `Training is done after ${last.epoch} epochs.${best}`;
  return `Epoch ${last.epoch}${all ? ` of ${all}${found.patience ? " at most" : ""}` : ""}${live ? (here ? ", training" : ", still training or stopped a moment ago") : here ? ", stopped" : ""}.${best}`;
}

function draw(best) {
  const line = (key) => rows.map((row) => [row.epoch, row[key] ?? NaN]);
  curves.show([{ name: "training", points: line("train_nats"), look: "quiet" }, { name: "validation", points: line("valid_nats"), look: "accent" }], best ? [{ x: best, name: "best", look: "dashed" }] : []);
}

/** What the best model draws now: the same codes each time, so that the samples are seen to grow. */
async function samples() {
  const fresh = draws();
  try {
    let content;
    if (run.kind === "images") {
      const { pictures } = await get(`/api/runs/${run.id}/samples`, { n: 32 });
      content = el("div", { className: "wall big" }, ...pictures.map((each) => paint(el("canvas"), run, each)));
    } else {
      const found = await get(`/api/runs/${run.id}/rows`, { n: 6 });
      content = table(found.columns, found.rows);
    }
    if (!fresh()) return;
    $("growing").replaceChildren(content);
    $("growing").hidden = $("growing-title").hidden = false;
  } catch (error) { if (fresh() && error.status !== 409) sorry("curves-note", error); }
}

async function halt() {
  if (waiting($("halt"))) return;
  waits($("halt"), true);
  try {
    await post(`/api/runs/${run.id}/stop`, {});
    note("curves-note", "Saving and stopping …");
  } catch (error) { sorry("curves-note", error); }
  waits($("halt"), false);
  timer = setTimeout(poll, 1000);
}

async function keep() {
  try { download(await blob(`/api/runs/${run.id}/download`), `${run.name}.zip`); } catch (error) { sorry("curves-note", error); }
}

async function components() {
  const fresh = spectra();
  note("spectrum-note", "Counting …");
  try {
    const found = await get(`/api/runs/${run.id}/spectrum`);
    if (!fresh()) return;
    const points = (values, by) => values.map((value, i) => [i + 1, by * value]);
    const series = [{ name: "NICE", points: points(found.sigma, found.deviation) }];
    if (found.pca) series.push({ name: "PCA of the data", points: points(found.pca, 1), look: "accent dashed" });
    spectrum.show(series, found.whitened ? [{ y: 1, name: "whitened data", look: "accent dashed" }] : []);
    note("spectrum-note", `A component with a large deviation is one in which ${run.kind === "images" ? "images" : "rows"} vary; one near zero is nearly fixed.`);
  } catch (error) { if (fresh()) sorry("spectrum-note", error, components); }
}
