// A model of a table: a row whose cells predict each other, a file with scores, and sample rows under conditions.
import { get, latest, post, send } from "./api.js";
import { $, cell, download, dropping, el, figure, note, sorry, svg, table, waiting, waits } from "./draw.js";

const draws = latest(), files = latest(), forms = latest(), fills = latest();
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i, DRAWS = 1000, ODD = 0.05, VERY = 0.01; // probabilities of a marked cell
let studio, run = null, seed = 0, columns = [], conditions = [], scored = null, file = null, made = null; // `made`: the form, once its columns are known

export function setup(given) {
  studio = given;
  $("rows-again").addEventListener("click", () => { seed += 1; rows(); });
  dropping($("table-drop"), $("table-file"), ([chosen]) => { file = chosen; score(); });
  $("predict").addEventListener("change", () => { if (file) score(); });
  $("conditions").addEventListener("submit", (event) => { event.preventDefault(); add(); });
  $("where-column").addEventListener("change", offer);
  $("save-scores").addEventListener("click", save);
  $("row").addEventListener("submit", (event) => { event.preventDefault(); fill(); });
  $("row").addEventListener("reset", empty);
  $("row").addEventListener("input", (event) => {
    say(event.target, "");
    const button = $("row").querySelector(".main");
    if (waiting(button)) { fills(); waits(button, false); note("row-note", "You changed a value: fill in again."); }
  });
}

export function choose() {
  for (const each of [draws, files, forms]) each();
  run = scored = file = null;
  columns = []; conditions = [];
  empty();
  for (const id of ["table-scores", "sample-rows", "row", "histograms", "where-chips"]) $(id).replaceChildren();
  for (const id of ["table-note", "rows-note", "where-note"]) note(id, "");
  $("table-done").hidden = $("conditions").hidden = true;
}

/** What is asked of the samples, and what is known of the row. */
export const state = () => ({ conditions, seed, known: fields().map(own) });

export async function restore(given) {
  conditions = given.conditions.map(String);
  seed = Math.max(0, Math.floor(Number(given.seed)) || 0);
  chips();
  rows();
  await made;
  fields().forEach((field, i) => { field.value = String(given.known[i] ?? ""); });
}

export function enter(chosen) {
  if (run === chosen) return;
  run = chosen;
  for (const id of ["row-pane", "score-table-pane"]) $(id).hidden = run.kind !== "table";
  if (run.kind === "table") made = form();
  rows();
}

// Sample rows, under conditions such as `age` >= 30 and `sex` = "F".

async function rows() {
  const fresh = draws(), where = conditions.join(" and ");
  note("rows-note", "Drawing …");
  try {
    const found = await get(`/api/runs/${run.id}/rows`, { n: 20, seed, ...(run.kind === "table" ? { of: DRAWS, where } : {}) });
    if (!fresh()) return;
    $("sample-rows").replaceChildren(table(found.columns, found.rows));
    $("histograms").replaceChildren(...found.histograms.map((each) => bars(each)));
    note("rows-note", "");
    note("where-note", where ? worth(found) : "");
  } catch (error) {
    if (!fresh()) return;
    sorry("rows-note", error, rows);
    if (error.status === 422 && conditions.length) { note("where-note", error.message, true); note("rows-note", ""); conditions.pop(); chips(); }
  }
}

/** The probability of the ranges, given the exact values, and the worth of the draws. */
function worth({ probability, effective_size, draws }) {
  const [exact, others] = [true, false].map((on) => conditions.some((each) => / = /.test(each) === on)), size = Math.round(effective_size);
  const share = probability < 1e-3 ? probability.toExponential(1) : `${(100 * probability).toPrecision(2)} %`;
  const words = others ? `${share} of the model’s rows${exact ? " with these exact values" : ""} meet the ${exact ? "other " : ""}conditions. ` : "";
  return `${words}${size < draws ? `These ${draws} draws are worth ${size} independent ones.` : ""}`;
}

/** A histogram with its ends; `named` is its caption. */
function bars({ column, counts, values, low, high }, named = true) {
  const most = Math.max(...counts), wide = 100 / counts.length, all = counts.reduce((a, b) => a + b, 0);
  const picture = svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": `Histogram of ${column}` });
  counts.forEach((count, i) => {
    const bar = svg("rect", { x: i * wide + 0.06 * wide, width: 0.88 * wide, y: 40 - 39 * count / most, height: 39 * count / most }), name = svg("title", {});
    name.textContent = `${values.length ? `${values[i]}: ` : ""}${(100 * count / all).toFixed(1)} %`;
    bar.append(name);
    picture.append(bar);
  });
  const ends = values.length ? [cell(values[0]), values.length > 1 ? cell(values.at(-1)) : ""] : [figure(low, 4), figure(high, 4)];
  return el("figure", {}, ...(named ? [el("figcaption", { title: column }, column)] : []), picture, el("p", {}, el("span", {}, ends[0]), el("span", {}, ends[1])));
}

const range = (column) => `${cell(column.low)} to ${cell(column.high)}`;

function offer() {
  const column = columns[$("where-column").selectedIndex];
  $("where-values").replaceChildren(...column.values.map((value) => el("option", { value: String(value) })));
  $("where-value").placeholder = column.kind === "category" ? String(column.values[0]) : range(column);
}

function add() {
  const column = columns[$("where-column").selectedIndex], value = $("where-value").value.trim().replace("−", "-");
  if (!value) { note("where-note", "Enter a value for the condition.", true); return $("where-value").focus(); }
  conditions.push(`\`${column.name}\` ${$("where-sign").value} ${NUMBER.test(value) ? value : `"${value.replaceAll('"', '""')}"`}`);
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
}

// A file: scores of rows and cells, missing cells, and a predicted column.

async function score() {
  const fresh = files(), ending = file.name.toLowerCase().split(".").pop(), predict = $("predict").value;
  note("table-note", `Reading ${file.name} …`);
  try {
    if (file.size > studio.limits.body) throw new Error(`${file.name} is larger than ${studio.limits.body / 2 ** 20} MB: use nicest score`);
    const found = await send(`/api/runs/${run.id}/table`, file, { predict, format: ending === "parquet" ? "parquet" : ["arrow", "feather"].includes(ending) ? "arrow" : "csv" });
    if (!fresh()) return;
    const rounded = (value, digits) => (value === null ? null : Number(value.toFixed(digits)));
    const lines = found.nats.map((nats, i) => [i + 1, found.unknown[i] ? "a value that training never saw" : rounded(nats, 2), rounded(found.denser[i] === null ? null : 100 * found.denser[i], 1), ...(predict ? found.predicted[i] : []), ...found.cells[i].map((value, d) => value ?? found.filled[i]?.[d] ?? null)]);
    scored = { names: ["row", "log-density, nats", `denser in ${found.reference}, %`, ...(predict ? [`predicted ${predict}`, "from", "to"] : []), ...found.columns], lines, by: 0, down: false, cells: found.cells, tails: found.tails, first: predict ? 6 : 3 };
    $("table-done").hidden = false;
    sorted();
    const all = found.total === lines.length, count = all ? `${found.total} rows` : `The first ${lines.length}${found.total ? ` of ${found.total}` : ""} rows`, holes = found.filled.length ? " Missing cells are filled in, in italics." : "";
    note("table-note", `${count} of ${file.name}${all ? "" : "; use nicest score for all of them"}.${holes} ${found.caveat}`);
  } catch (error) { if (fresh()) { $("table-scores").replaceChildren(); $("table-done").hidden = true; sorry("table-note", error); } }
}

/** Show the scored rows in the chosen order; what is no number comes last. */
function sorted() {
  const { names, lines, by, down, cells, tails, first } = scored, number = (value) => (typeof value === "number" ? value : value !== null && NUMBER.test(value) ? Number(value) : null);
  const order = (a, b) => {
    const [x, y] = [number(a[by]), number(b[by])];
    if (x === null || y === null) return x === y ? String(a[by]).localeCompare(String(b[by])) * (down ? -1 : 1) : x === null ? 1 : -1;
    return down ? y - x : x - y;
  };
  const shown = [...lines].sort(order), drawn = table(names, shown);
  drawn.querySelectorAll("th").forEach((head, i) => {
    const button = el("button", { type: "button" }, head.textContent);
    button.addEventListener("click", () => { Object.assign(scored, { by: i, down: by === i && !down }); sorted(); $("table-scores").querySelectorAll("th button")[i].focus(); });
    head.replaceChildren(button);
    if (i === by) head.setAttribute("aria-sort", down ? "descending" : "ascending");
  });
  [...drawn.tBodies[0].rows].forEach((line, k) => {
    const i = shown[k][0] - 1, button = el("button", { type: "button", ariaLabel: `What is expected of the cells of row ${i + 1}?` }, String(i + 1));
    button.addEventListener("click", () => open(cells[i]));
    line.cells[0].replaceChildren(button);
    cells[i].forEach((value, d) => {
      const spot = line.cells[first + d], tail = tails[i]?.[d] ?? 1;
      spot.classList.toggle("filled", value === null);
      spot.classList.toggle("odd", tail < ODD);
      spot.classList.toggle("very", tail < VERY);
      if (tail < ODD) spot.title = `Surprising: given the other cells, only ${(100 * tail).toFixed(1)} % of values fit as badly.`;
    });
  });
  $("table-scores").replaceChildren(drawn);
}

/** Put a row of the file into the form. */
function open(cells) {
  empty();
  fields().forEach((field, i) => { field.value = cells[i] === null ? "" : columns[i].kind === "category" ? String(columns[i].values.findIndex((each) => String(each) === String(cells[i]))).replace("-1", "") : String(cells[i]); });
  $("row-pane").scrollIntoView({ block: "start" });
  fill();
}

function save() {
  const quoted = (value) => (value === null ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const text = [scored.names, ...scored.lines].map((line) => line.map(quoted).join(",")).join("\n");
  download(new Blob([`${text}\n`], { type: "text/csv" }), `${file.name.replace(/\.[^.]*$/, "")}-scores.csv`);
}

// One row: every column is predicted from the known cells of the others.

async function form() {
  const fresh = forms();
  try {
    const found = await get(`/api/runs/${run.id}/columns`);
    if (!fresh()) return;
    columns = found.columns;
    $("where-column").replaceChildren(...columns.map((column) => el("option", {}, column.name)));
    $("predict").replaceChildren(el("option", { value: "" }, "none"), ...columns.map((column) => el("option", {}, column.name)));
    $("conditions").hidden = false;
    offer();
    const made = columns.map((column, i) => {
      const input = column.kind === "category"
        ? el("select", { name: column.name }, el("option", { value: "" }, "unknown"), ...column.values.map((value, k) => el("option", { value: String(k) }, String(value))))
        : el("input", { name: column.name, type: "text", inputMode: column.kind === "moment" ? "text" : "decimal", placeholder: range(column) });
      input.setAttribute("aria-describedby", `row-${i}`);
      return el("div", {}, el("label", {}, column.name, input), el("p", { className: "hint", id: `row-${i}` }), el("div", { className: "histograms" }));
    });
    $("row").replaceChildren(...made, el("div", { className: "row" }, el("button", { className: "main" }, "Fill in"), el("button", { type: "reset" }, "Clear")));
    note("row-note", "");
  } catch (error) { if (fresh()) sorry("row-note", error, form); }
}

const fields = () => [...$("row").querySelectorAll("input, select")];
const own = (field) => (field.closest("div").classList.contains("found") ? "" : field.value.trim());

/** Words below a field; they end when it is edited. */
function say(field, words, look = "") {
  const box = field.closest("div");
  for (const each of ["found", "wrong"]) box.classList.toggle(each, each === look);
  if (look === "wrong") field.setAttribute("aria-invalid", "true");
  else field.removeAttribute("aria-invalid");
  box.querySelector(".hint").textContent = words;
  box.querySelector(".histograms").replaceChildren();
}

function empty() {
  fills();
  for (const field of fields()) say(field, "");
  const button = $("row").querySelector(".main");
  if (button) waits(button, false);
  note("row-note", "");
}

async function fill() {
  const button = $("row").querySelector(".main"), asked = fields();
  if (waiting(button)) return;
  const given = asked.map((field, i) => [columns[i], own(field)]).filter(([, value]) => value !== "");
  const cells = Object.fromEntries(given.map(([column, value]) => [column.name, column.kind === "category" ? column.values[Number(value)] : value.replace("−", "-")]));
  const fresh = fills();
  note("row-note", "Filling in …");
  waits(button, true);
  try {
    const found = await post(`/api/runs/${run.id}/row`, { cells });
    if (!fresh()) return;
    found.cells.forEach((each, i) => {
      const { values, counts } = each.histogram, expected = each.low === null ? `mostly ${values[counts.indexOf(Math.max(...counts))]}` : `90 % between ${figure(each.low, 4)} and ${figure(each.high, 4)}`;
      if (each.known) say(asked[i], each.tail < ODD ? `surprising; expected: ${expected}` : "", each.tail < ODD ? "wrong" : "");
      else {
        asked[i].value = columns[i].kind === "category" ? String(columns[i].values.indexOf(each.value)) : String(each.value);
        say(asked[i], `filled in; ${expected}`, "found");
      }
      asked[i].closest("div").querySelector(".histograms").append(bars(each.histogram, false));
    });
    note("row-note", `${found.cells.every((each) => each.known) ? "" : "The empty fields are filled in. "}Each histogram shows what the model expects of a field, given the others that you entered.`);
  } catch (error) {
    if (!fresh()) return;
    sorry("row-note", error);
    asked.filter((field) => error.message.includes(`'${field.name}'`)).forEach((field) => { say(field, error.message, "wrong"); field.focus(); });
  }
  waits(button, false);
}
