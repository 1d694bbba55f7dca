// A model of a table: sample rows, scores of rows, and a row filled in.
import { get, post, send } from "./api.js";
import { $, dropping, el, note } from "./draw.js";

let studio, run = null, seed = 0, columns = [];

export function setup(given) {
  studio = given;
  $("rows-again").addEventListener("click", () => { seed += 1; rows(); });
  $("rows-temperature").addEventListener("input", () => { $("rows-temperature-value").value = Number($("rows-temperature").value).toFixed(2); rows(); });
  dropping($("table-drop"), $("table-file"), score);
  $("impute").addEventListener("submit", impute);
}

export function choose() { run = null; $("table-scores").replaceChildren(); note("table-note", ""); }

export function enter(chosen) {
  if (run === chosen) return;
  run = chosen;
  $("score-table-pane").hidden = run.kind !== "table";
  $("impute-pane").hidden = !run.imputes;
  if (run.imputes) form();
  rows();
}

const cell = (value) => (value === null ? "–" : typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(6)) : String(value));

function table(names, lines) {
  const kind = (value) => (typeof value === "number" ? "number" : "");
  const head = el("tr", {}, ...names.map((name, i) => el("th", { scope: "col", className: kind(lines[0]?.[i]) }, name)));
  const body = lines.map((line) => el("tr", {}, ...line.map((value) => el("td", { className: kind(value) }, cell(value)))));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

async function rows() {
  note("rows-note", "Drawing …");
  try {
    const found = await get(`/api/runs/${run.id}/rows`, { n: 20, seed, temperature: $("rows-temperature").value });
    $("sample-rows").replaceChildren(table(found.columns, found.rows));
    note("rows-note", "");
  } catch (error) { note("rows-note", error.message, true); }
}

async function score([file]) {
  note("table-note", `Reading ${file.name} …`);
  try {
    if (file.size > studio.limits.body) throw new Error(`${file.name} is larger than ${studio.limits.body / 2 ** 20} MB: use nicest score`);
    const ending = file.name.toLowerCase().split(".").pop();
    const found = await send(`/api/runs/${run.id}/table`, file, { format: ending === "parquet" ? "parquet" : ["arrow", "feather"].includes(ending) ? "arrow" : "csv" });
    const lines = found.scores.map((each, i) => [each.row + 1, each.nats ?? each.why, each.denser_share === null ? null : `${(100 * each.denser_share).toFixed(1)} %`, ...found.cells[i]]);
    $("table-scores").replaceChildren(table(["row", "log-density, nats", "denser in training", ...found.columns], lines));
    const cut = found.total > found.scores.length ? `, the first ${found.scores.length} shown` : "";
    note("table-note", `${found.total} rows of ${file.name}${cut}. ${found.caveat}`);
  } catch (error) { $("table-scores").replaceChildren(); note("table-note", error.message, true); }
}

async function form() {
  try {
    columns = (await get(`/api/runs/${run.id}/columns`)).columns;
    const fields = columns.map((column) => {
      const input = column.kind === "values"
        ? el("select", { name: column.name }, el("option", { value: "" }, "unknown"), ...column.values.map((value, i) => el("option", { value: String(i) }, String(value))))
        : el("input", { name: column.name, type: "text", inputMode: "decimal", placeholder: `${cell(column.low)} to ${cell(column.high)}` });
      return el("div", {}, el("label", {}, column.name, input), el("p", { className: "hint" }));
    });
    $("impute").replaceChildren(...fields, el("div", { className: "row" }, el("button", { className: "main" }, "Fill in"), el("button", { type: "reset" }, "Clear")));
  } catch (error) { note("impute-note", error.message, true); }
}

async function impute(event) {
  event.preventDefault();
  const fields = [...$("impute").querySelectorAll("input, select")], cells = {};
  fields.forEach((field, i) => {
    const own = field.closest("div").classList.contains("found") ? "" : field.value.trim();
    cells[columns[i].name] = own === "" ? null : columns[i].kind === "values" ? columns[i].values[Number(own)] : Number(own);
  });
  note("impute-note", "Filling in …");
  try {
    const found = await post(`/api/runs/${run.id}/impute`, { cells });
    found.cells.forEach((each, i) => {
      const box = fields[i].closest("div");
      box.classList.toggle("found", !each.known);
      if (each.known) { box.querySelector(".hint").textContent = ""; return; }
      const ordered = columns[i].kind !== "values", plain = (value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(4)) : value);
      fields[i].value = ordered ? plain(each.value) : String(columns[i].values.indexOf(each.value));
      box.querySelector(".hint").textContent = ordered && each.low !== null ? `found; 90 % between ${plain(each.low)} and ${plain(each.high)}` : "found; the most frequent";
    });
    note("impute-note", "What was empty is filled in. Clear starts anew.");
  } catch (error) { note("impute-note", error.message, true); }
}
$("impute").addEventListener("reset", () => { for (const each of $("impute").querySelectorAll(".found")) { each.classList.remove("found"); each.querySelector(".hint").textContent = ""; } note("impute-note", ""); });
