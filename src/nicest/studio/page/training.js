// The likelihood of a run over its epochs, while it trains too, and the spectrum of its scaling layer.
import { get } from "./api.js";
import { note, Plot } from "./draw.js";

let run = null, rows = [], curves, spectrum, timer = 0;

export function setup() {
  const value = (each) => (Number.isFinite(each) ? each.toFixed(2) : "–");
  curves = new Plot("curves", { x: "epoch", y: "nats", floor: 0.05, tip: (i, [train, valid]) => `epoch ${train.points[i][0]}\ntraining ${value(train.points[i][1])}\nvalidation ${value(valid.points[i][1])}` });
  spectrum = new Plot("spectrum", { x: "component, from the largest", y: "sd", tip: (i, series) => `component ${i + 1}\n${series.map((each) => `${each.name} ${each.points[i]?.[1].toPrecision(4)}`).join("\n")}` });
}

export function choose() { run = null; rows = []; curves.show([]); spectrum.show([]); leave(); }
export function leave() { clearTimeout(timer); }

export function enter(chosen) {
  if (run !== chosen) {
    run = chosen;
    if (run.ready) components();
    else note("spectrum-note", "There is no model yet.");
  }
  poll();
}

async function poll() {
  clearTimeout(timer);
  const asked = run;
  let wait = 10_000;
  try {
    const found = await get(`/api/runs/${run.id}/metrics`, { after: rows.at(-1)?.step ?? -1 });
    if (asked !== run) return;
    if (found.rows.length) { rows.push(...found.rows); draw(); }
    const last = rows.at(-1), live = found.idle_seconds !== null && found.idle_seconds < 60;
    wait = live ? 2000 : 10_000;
    const where = last ? `Epoch ${last.epoch}${found.epochs ? ` of ${found.epochs}` : ""}, ${last.valid_nats?.toFixed(2) ?? "–"} nats on validation` : "No figures yet: the first come with the first validation.";
    note("curves-note", last ? `${where}${live ? "; still training, or just done" : ""}.` : where);
  } catch (error) { note("curves-note", error.message, true); wait = 5000; }
  timer = setTimeout(poll, wait);
}

function draw() {
  const line = (key) => rows.map((row) => [row.epoch, row[key] ?? NaN]);
  curves.show([{ name: "training", points: line("train_nats"), look: "quiet" }, { name: "validation", points: line("valid_nats"), look: "accent" }]);
}

async function components() {
  note("spectrum-note", "Counting …");
  try {
    const found = await get(`/api/runs/${run.id}/spectrum`);
    const points = (values, by) => values.map((value, i) => [i + 1, by * value]);
    const series = [{ name: "NICE", points: points(found.sigma, found.deviation) }];
    if (found.pca) series.push({ name: "PCA of the data", points: points(found.pca, 1), look: "accent dashed" });
    spectrum.show(series, found.whitened ? [{ y: 1, name: "whitened data", look: "accent dashed" }] : []);
    note("spectrum-note", "A component with a large deviation is one in which images vary; one near zero is nearly fixed.");
  } catch (error) { note("spectrum-note", error.message, true); }
}
