// A model of a table: sample rows and their histograms, under conditions, scores of rows, and a row filled in.
import { get, latest, post, send } from "./api.js";
import { $, cell, download, dropping, el, figure, note, soon, sorry, svg, table, waiting, waits } from "./draw.js";

const draws = latest(), files = latest(), forms = latest(), fills = latest();
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const DRAWS = 1000; // that histograms are of
const looks = latest();
let studio, run = null, seed = 0, columns = [], conditions = [], scored = null, made = null; // `made`: the form, when its columns have come

export function setup(given) {
  studio = given;
  const redraw = soon(() => { if (run) rows(); });
  $("rows-again").addEventListener("click", () => { seed += 1; rows(); });
  $("rows-temperature").addEventListener("input", () => { $("rows-temperature-value").value = Number($("rows-temperature").value).toFixed(2); redraw(); });
  dropping($("table-drop"), $("table-file"), score);
  $("conditions").addEventListener("submit", (event) => { event.preventDefault(); add(); });
  $("where-column").addEventListener("change", offer);
  $("save-scores").addEventListener("click", save);
  $("impute").addEventListener("submit", impute);
  $("impute").addEventListener("reset", empty);
  $("impute").addEventListener("input", (event) => {
    say(event.target, "");
    const button = $("impute").querySelector(".main");
    if (waiting(button)) { fills(); waits(button, false); note("impute-note", "You changed a value: fill in again."); }
  });
}

export function choose() {
  for (const each of [draws, files, forms, looks]) each();
  run = scored = null;
  columns = []; conditions = [];
  empty();
  for (const id of ["table-scores", "sample-rows", "impute", "histograms", "where-chips"]) $(id).replaceChildren();
  for (const id of ["table-note", "rows-note", "where-note", "cells-note"]) note(id, "");
  $("table-done").hidden = $("conditions").hidden = true;
  $("rows-temperature").disabled = false;
}

/** What is asked of the samples, and what is known of the row. */
export const state = () => ({ conditions, seed, temperature: $("rows-temperature").value, known: fields().map((field) => (field.closest("div").classList.contains("found") ? "" : field.value)) });

export async function restore(given) {
  conditions = given.conditions.map(String);
  seed = Math.max(0, Math.floor(Number(given.seed)) || 0);
  $("rows-temperature").value = String(given.temperature);
  $("rows-temperature-value").value = Number($("rows-temperature").value).toFixed(2);
  chips();
  rows();
  await made;
  fields().forEach((field, i) => { field.value = String(given.known[i] ?? ""); });
}

export function enter(chosen) {
  if (run === chosen) return;
  run = chosen;
  $("score-table-pane").hidden = run.kind !== "table";
  $("impute-pane").hidden = !run.imputes;
  if (run.imputes) made = form();
  rows();
}

async function rows() {
  const fresh = draws();
  note("rows-note", "Drawing …");
  try {
    const where = conditions.join(" and "), given = { n: 20, seed, temperature: $("rows-temperature").value, of: run.imputes ? DRAWS : 0 };
    const found = await get(`/api/runs/${run.id}/rows`, where ? { ...given, temperature: 1, where } : given);
    if (!fresh()) return;
    $("sample-rows").replaceChildren(table(found.columns, found.rows));
    $("histograms").replaceChildren(...found.histograms.map(bars));
    note("rows-note", "");
    const share = found.share === null ? "" : `${found.share < 1e-3 ? found.share.toExponential(1) : `${(100 * found.share).toPrecision(2)} %`} of the model’s rows meet the conditions. `;
    note("where-note", where ? `${share}${found.r_hat > 1.1 ? `R̂ = ${found.r_hat.toFixed(2)}: the chains do not agree, so do not trust these rows.` : ""}` : "");
  } catch (error) {
    if (!fresh()) return;
    sorry("rows-note", error, rows);
    if (error.status === 422 && conditions.length) { note("where-note", error.message, true); note("rows-note", ""); conditions.pop(); chips(); }
  }
}

/** How often a column has its values among the draws. */
function bars({ column, counts, values, low, high }) {
  const most = Math.max(...counts), wide = 100 / counts.length, all = counts.reduce((a, b) => a + b, 0);
  const picture = svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": `Histogram of ${column}` });
  counts.forEach((count, i) => {
    const bar = svg("rect", { x: i * wide + 0.06 * wide, width: 0.88 * wide, y: 40 - 39 * count / most, height: 39 * count / most }), name = svg("title", {});
    name.textContent = `${values.length ? `${values[i]}: ` : ""}${(100 * count / all).toFixed(1)} %`;
    bar.append(name);
    picture.append(bar);
  });
  const ends = values.length ? [cell(values[0]), values.length > 1 ? cell(values.at(-1)) : ""] : [figure(low, 4), figure(high, 4)];
  return el("figure", {}, el("figcaption", { title: column }, column), picture, el("p", {}, el("span", {}, ends[0]), el("span", {}, ends[1])));
}

// Conditions: `age` >= 30 and `sex` = "F".

function offer() {
  const column = columns[$("where-column").selectedIndex];
  $("where-values").replaceChildren(...column.values.slice(0, 100).map((value) => el("option", { value: String(value) })));
  $("where-value").placeholder = column.kind === "values" ? String(column.values[0]) : `${cell(column.low)} to ${cell(column.high)}`;
}

function add() {
  const column = columns[$("where-column").selectedIndex], value = $("where-value").value.trim().replace("−", "-");
  if (!value) { note("where-note", "Enter a value for the condition.", true); return $("where-value").focus(); }
  const plain = NUMBER.test(value) && column.kind !== "values" ? value : `"${value.replaceAll('"', '""')}"`;
  conditions.push(`\`${column.name}\` ${$("where-sign").value} ${plain}`);
  $("where-value").value = "";
  chips();
  rows();
}

function chips() {
  $("where-chips").replaceChildren(...conditions.map((each, i) => {
    const button = el("button", { type: "button", ariaLabel: `Remove the condition ${each}` }, `${each.replaceAll("`", "")} ×`);
    button.addEventListener("click", () => { conditions.splice(i, 1); chips(); rows(); $("where-value").focus(); });
    return el("li", {}, button);
  }));
  $("rows-temperature").disabled = conditions.length > 0;
}

async function score([file]) {
  const fresh = files();
  note("table-note", `Reading ${file.name} …`);
  try {
    if (file.size > studio.limits.body) throw new Error(`${file.name} is larger than ${studio.limits.body / 2 ** 20} MB: use nicest score`);
    const ending = file.name.toLowerCase().split(".").pop();
    const found = await send(`/api/runs/${run.id}/table`, file, { format: ending === "parquet" ? "parquet" : ["arrow", "feather"].includes(ending) ? "arrow" : "csv" });
    if (!fresh()) return;
    const lines = found.scores.map((each, i) => [each.row + 1, each.nats === null ? each.why : Number(each.nats.toFixed(2)), each.denser_share === null ? null : Number((100 * each.denser_share).toFixed(1)), ...found.cells[i]]);
    scored = { names: ["row", "log-density, nats", `denser in ${found.reference}, %`, ...found.columns], lines, by: 0, down: false, name: file.name };
    $("table-done").hidden = false;
    note("cells-note", "");
    sorted();
    const all = found.total === found.scores.length, count = all ? `${found.total} rows` : `The first ${found.scores.length}${found.total ? ` of ${found.total}` : ""} rows`;
    note("table-note", `${count} of ${file.name}${all ? "" : "; use nicest score for all of them"}. ${found.caveat}`);
  } catch (error) { if (fresh()) { $("table-scores").replaceChildren(); $("table-done").hidden = true; sorry("table-note", error); } }
}

/** The scored rows in the order that was asked for; what is no number comes last. */
function sorted() {
  const { names, lines, by, down } = scored, number = (value) => (typeof value === "number" ? value : value !== null && NUMBER.test(value) ? Number(value) : null);
  const order = (a, b) => {
    const [x, y] = [number(a[by]), number(b[by])];
    if (x === null || y === null) return x === y ? String(a[by]).localeCompare(String(b[by])) * (down ? -1 : 1) : x === null ? 1 : -1;
    return down ? y - x : x - y;
  };
  const made = table(names, [...lines].sort(order));
  made.querySelectorAll("th").forEach((head, i) => {
    const button = el("button", { type: "button" }, head.textContent);
    button.addEventListener("click", () => { Object.assign(scored, { by: i, down: by === i && !down }); sorted(); $("table-scores").querySelectorAll("th button")[i].focus(); });
    head.replaceChildren(button);
    if (i === by) head.setAttribute("aria-sort", down ? "descending" : "ascending");
  });
  for (const line of made.tBodies[0].rows) {
    const button = el("button", { type: "button", ariaLabel: `Which cells of row ${line.cells[0].textContent} are surprising?` }, line.cells[0].textContent);
    button.addEventListener("click", () => surprising(line, button));
    line.cells[0].replaceChildren(button);
  }
  $("table-scores").replaceChildren(made);
}

/** Mark the cells of a row that the model does not expect, given the others. */
async function surprising(line, button) {
  if (waiting(button)) return;
  const fresh = looks(), given = scored.lines.find((each) => each[0] === Number(button.textContent)).slice(3);
  const known = (column, value) => (column.kind === "values" ? column.values.find((each) => String(each) === String(value)) ?? value : value);
  waits(button, true);
  note("cells-note", `Looking at row ${button.textContent} …`);
  try {
    const { cells } = await post(`/api/runs/${run.id}/cells`, { cells: Object.fromEntries(columns.map((column, i) => [column.name, known(column, given[i])])) });
    if (!fresh()) return;
    const odd = cells.map((each, i) => ({ ...each, own: given[i], place: i })).filter((each) => each.tail < 0.05);
    const expected = (each) => (each.low === null ? `mostly ${each.likely}` : `${figure(each.low, 4)} to ${figure(each.high, 4)}`);
    odd.forEach((each) => { const spot = line.cells[each.place + 3]; spot.classList.add("odd"); spot.classList.toggle("very", each.tail < 0.01); spot.title = `Given the other cells, expected ${expected(each)}.`; });
    note("cells-note", odd.length ? `Row ${button.textContent}: ${odd.map((each) => `${each.column} is ${cell(each.own)}, expected ${expected(each)}`).join("; ")}, given the other cells.` : `Row ${button.textContent}: no cell is surprising, given the others.`);
  } catch (error) { if (fresh()) sorry("cells-note", error); }
  waits(button, false);
}

function save() {
  const quoted = (value) => (value === null ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const text = [scored.names, ...scored.lines].map((line) => line.map(quoted).join(",")).join("\n");
  download(new Blob([`${text}\n`], { type: "text/csv" }), `${scored.name.replace(/\.[^.]*$/, "")}-scores.csv`);
}

async function form() {
  const fresh = forms();
  try {
    const found = await get(`/api/runs/${run.id}/columns`);
    if (!fresh()) return;
    columns = found.columns;
    $("where-column").replaceChildren(...columns.map((column) => el("option", {}, column.name)));
    $("conditions").hidden = false;
    offer();
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
  say(field, `${column.name}: expected a number, as 1.5, got ${own.slice(0, 40)}; correct it or leave it empty`, { bad: true });
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
    note("impute-note", "The empty fields are filled in. Clear starts over.");
  } catch (error) {
    if (!fresh()) return;
    sorry("impute-note", error);
    asked.forEach((field) => { if (error.message.includes(`'${field.name}'`) || error.message.startsWith(`${field.name}:`)) field.setAttribute("aria-invalid", "true"); });
  }
  waits(button, false);
}
