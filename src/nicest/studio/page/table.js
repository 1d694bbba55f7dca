// A model of a table: sample rows, scores of rows, and a row filled in.
import { get, latest, post, send } from "./api.js";
import { $, cell, dropping, el, figure, note, soon, sorry, table, waiting, waits } from "./draw.js";

const draws = latest(), files = latest(), forms = latest(), fills = latest();
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
let studio, run = null, seed = 0, columns = [];

export function setup(given) {
  studio = given;
  const redraw = soon(() => { if (run) rows(); });
  $("rows-again").addEventListener("click", () => { seed += 1; rows(); });
  $("rows-temperature").addEventListener("input", () => { $("rows-temperature-value").value = Number($("rows-temperature").value).toFixed(2); redraw(); });
  dropping($("table-drop"), $("table-file"), score);
  $("impute").addEventListener("submit", impute);
  $("impute").addEventListener("reset", empty);
  $("impute").addEventListener("input", (event) => {
    say(event.target, "");
    const button = $("impute").querySelector(".main");
    if (waiting(button)) { fills(); waits(button, false); note("impute-note", "Changed meanwhile: fill in again."); }
  });
}

export function choose() {
  for (const each of [draws, files, forms]) each();
  run = null;
  columns = [];
  empty();
  for (const id of ["table-scores", "sample-rows", "impute"]) $(id).replaceChildren();
  for (const id of ["table-note", "rows-note"]) note(id, "");
}

export function enter(chosen) {
  if (run === chosen) return;
  run = chosen;
  $("score-table-pane").hidden = run.kind !== "table";
  $("impute-pane").hidden = !run.imputes;
  if (run.imputes) form();
  rows();
}

async function rows() {
  const fresh = draws();
  note("rows-note", "Drawing …");
  try {
    const found = await get(`/api/runs/${run.id}/rows`, { n: 20, seed, temperature: $("rows-temperature").value });
    if (!fresh()) return;
    $("sample-rows").replaceChildren(table(found.columns, found.rows));
    note("rows-note", "");
  } catch (error) { if (fresh()) sorry("rows-note", error, rows); }
}

async function score([file]) {
  const fresh = files();
  note("table-note", `Reading ${file.name} …`);
  try {
    if (file.size > studio.limits.body) throw new Error(`${file.name} is larger than ${studio.limits.body / 2 ** 20} MB: use nicest score`);
    const ending = file.name.toLowerCase().split(".").pop();
    const found = await send(`/api/runs/${run.id}/table`, file, { format: ending === "parquet" ? "parquet" : ["arrow", "feather"].includes(ending) ? "arrow" : "csv" });
    if (!fresh()) return;
    const lines = found.scores.map((each, i) => [each.row + 1, each.nats ?? each.why, each.denser_share === null ? null : `${(100 * each.denser_share).toFixed(1)} %`, ...found.cells[i]]);
    $("table-scores").replaceChildren(table(["row", "log-density, nats", `denser in ${found.reference}`, ...found.columns], lines));
    const all = found.total === found.scores.length, count = all ? `${found.total} rows` : `The first ${found.scores.length}${found.total ? ` of ${found.total}` : ""} rows`;
    note("table-note", `${count} of ${file.name}${all ? "" : "; nicest score does them all"}. ${found.caveat}`);
  } catch (error) { if (fresh()) { $("table-scores").replaceChildren(); sorry("table-note", error); } }
}

async function form() {
  const fresh = forms();
  try {
    const found = await get(`/api/runs/${run.id}/columns`);
    if (!fresh()) return;
    columns = found.columns;
    const fields = columns.map((column, i) => {
      const input = column.kind === "values"
        ? el("select", { name: column.name }, el("option", { value: "" }, "unknown"), ...column.values.map((value, i) => el("option", { value: String(i) }, String(value))))
        : el("input", { name: column.name, type: "text", inputMode: column.moment ? "text" : "decimal", placeholder: `${cell(column.low)} to ${cell(column.high)}` });
      input.setAttribute("aria-describedby", `impute-${i}`);
      return el("div", {}, el("label", {}, column.name, input), el("p", { className: "hint", id: `impute-${i}` }));
    });
    $("impute").replaceChildren(...fields, el("div", { className: "row" }, el("button", { className: "main" }, "Fill in"), el("button", { type: "reset" }, "Clear")));
    note("impute-note", "");
  } catch (error) { if (fresh()) sorry("impute-note", error, form); }
}

const fields = () => [...$("impute").querySelectorAll("input, select")];

/** Words below a field; what is said of it as found, or as wrong, ends when it is edited. */
function say(field, words, { found = false, bad = false } = {}) {
  const box = field.closest("div");
  box.classList.toggle("found", found);
  box.classList.toggle("wrong", bad);
  if (bad) field.setAttribute("aria-invalid", "true");
  else field.removeAttribute("aria-invalid");
  box.querySelector(".hint").textContent = words;
}

function empty() {
  fills();
  for (const field of fields()) say(field, "");
  const button = $("impute").querySelector(".main");
  if (button) waits(button, false);
  note("impute-note", "");
}

/** What is known of a field: null where it is empty or was found; undefined, and said so, where it is not a number. */
function known(field, column) {
  const own = field.closest("div").classList.contains("found") ? "" : field.value.trim();
  if (own === "") return null;
  if (column.kind === "values") return column.values[Number(own)];
  if (column.moment) return own;
  const plain = own.replace("−", "-");
  if (NUMBER.test(plain) && Number.isFinite(Number(plain))) return Number(plain);
  say(field, `${column.name}: expected a number, as 1.5, got ${own.slice(0, 40)}; correct it, or leave it empty`, { bad: true });
}

async function impute(event) {
  event.preventDefault();
  const button = $("impute").querySelector(".main"), asked = fields();
  if (waiting(button)) return;
  const values = asked.map((field, i) => known(field, columns[i])), wrong = asked.filter((_, i) => values[i] === undefined);
  if (wrong.length) {
    note("impute-note", `Nothing is filled in: expected a number in ${wrong.map((field) => field.name).join(", ")}.`, true);
    return wrong[0].focus();
  }
  const fresh = fills(), cells = Object.fromEntries(columns.map((column, i) => [column.name, values[i]]).filter(([, value]) => value !== null));
  note("impute-note", "Filling in …");
  waits(button, true);
  try {
    const found = await post(`/api/runs/${run.id}/impute`, { cells });
    if (!fresh()) return;
    found.cells.forEach((each, i) => {
      if (each.known) return say(asked[i], "");
      const ordered = columns[i].kind !== "values", plain = (value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(4)) : value);
      asked[i].value = ordered ? plain(each.value) : String(columns[i].values.indexOf(each.value));
      say(asked[i], ordered && each.low !== null ? `found; 90 % between ${figure(each.low, 4)} and ${figure(each.high, 4)}` : "found; the most frequent", { found: true });
    });
    note("impute-note", "What was empty is filled in. Clear starts anew.");
  } catch (error) {
    if (!fresh()) return;
    sorry("impute-note", error);
    asked.forEach((field) => { if (error.message.includes(`'${field.name}'`) || error.message.startsWith(`${field.name}:`)) field.setAttribute("aria-invalid", "true"); });
  }
  waits(button, false);
}
