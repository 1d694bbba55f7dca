// The frame of the page: which run, which view, and whether the server is there.
import { expectForms, forget, get, onChange, onConnection } from "./api.js";
import { $, el, note } from "./draw.js";
import * as compare from "./compare.js";
import * as explore from "./explore.js";
import * as inpaint from "./inpaint.js";
import * as score from "./score.js";
import * as table from "./table.js";
import * as train from "./train.js";
import * as training from "./training.js";

const views = { inpaint, explore, score, table, training, compare, train };
const studio = { folder: "", show: open, run: null, runs: [], limits: null, masks: [], own: [], refresh }; // `own`: pictures that the user gave
let shown = null;

function setup() {
  $("link").addEventListener("click", link);
  onConnection((there) => {
    $("banner").hidden = there;
    $("banner").textContent = there ? "" : "The server does not answer. Is nicest studio still running? Trying again …";
    if (there && studio.run) refresh();
  });
  onChange(refresh);
  for (const view of Object.values(views)) view.setup(studio);
  for (const each of ["dragover", "drop"]) addEventListener(each, (event) => event.preventDefault()); // a file beside a field stays outside
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
  $("views").addEventListener("click", () => scrollTo(0, 0));
  $("run").addEventListener("change", () => { history.pushState(null, "", address(shown, $("run").value)); route(); });
  start();
}

async function start() {
  let found;
  try { found = await get("/api/runs"); } catch (error) {
    note("state", error.message, true);
    setTimeout(start, 3000);
    return;
  }
  Object.assign(studio, { limits: found.limits, masks: found.masks, folder: found.folder });
  $("version").textContent = `nicest ${found.version}`;
  list(found.runs);
  addEventListener("hashchange", route);
  route();
}

function list(runs) {
  studio.runs = runs;
  $("run").replaceChildren(...runs.map((run) => el("option", { value: run.id }, label(run))));
  $("run").disabled = runs.length < 2;
  if (studio.run) $("run").value = studio.run.id;
}

/** Show a run that may be new in a view. */
async function open(view, id) {
  const found = await get("/api/runs"), old = new Map(studio.runs.map((each) => [each.id, each]));
  list(found.runs.map((each) => (each.id === studio.run?.id ? old.get(each.id) : each)));
  history.pushState(null, "", address(view, id));
  route();
}

// A link that holds all that is shown: the state of the view, as JSON in base64, behind the view and the run.

const packed = (state) => btoa(String.fromCharCode(...new TextEncoder().encode(JSON.stringify(state)))).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
const unpacked = (text) => JSON.parse(new TextDecoder().decode(Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (each) => each.charCodeAt(0))));

async function link() {
  const state = views[shown]?.state?.() ?? {}, made = `${address(shown, studio.run.id)}?${packed(state)}`;
  if (made.length > 30_000) return say("These images are too large for a link.");
  history.replaceState(null, "", made);
  try {
    await navigator.clipboard.writeText(location.href);
    say("Link copied.");
  } catch { say("Copy the link from the address bar."); }
}

let saying = 0;
function say(words) {
  $("link-said").textContent = words;
  clearTimeout(saying);
  saying = setTimeout(() => { $("link-said").textContent = ""; }, 4000);
}

const label = (run) => (run.name === run.dataset || !run.dataset ? run.name : `${run.name} (${run.dataset})`);
const address = (view, id) => `#${view}/${encodeURIComponent(id)}`;

/** What the server says of the runs now: one that has got, changed or lost its model is shown anew. */
async function refresh() {
  let found;
  try { found = await get("/api/runs"); } catch { return; }
  if (!found.runs.some((each) => each.id === studio.run.id)) return location.reload();
  studio.runs = found.runs.map((now) => {
    const before = studio.runs.find((each) => each.id === now.id);
    return before && before.ready === now.ready && before.form === now.form && before.why === now.why ? before : now;
  });
  studio.runs.forEach((run) => { const option = [...$("run").options].find((each) => each.value === run.id); if (option) option.textContent = label(run); });
  if (studio.runs.includes(studio.run)) return;
  choose(studio.run.id);
  route();
}

function choose(id) {
  if (shown) views[shown].leave?.();
  shown = null;
  forget();
  studio.run = studio.runs.find((each) => each.id === id);
  expectForms(studio.runs);
  studio.own = [];
  $("run").value = id;
  const [height, width] = studio.run.shape.length > 1 ? studio.run.shape.slice(-2) : [1, 1];
  document.documentElement.style.setProperty("--ratio", `${width} / ${height}`);
  for (const link of $("views").children) {
    link.hidden = Boolean(link.dataset.for) && !link.dataset.for.split(" ").includes(studio.run.kind) || link.dataset.view === "compare" && studio.runs.length < 2;
    link.hash = address(link.dataset.view, id);
  }
  for (const view of Object.values(views)) view.choose?.(studio.run); // what is shown of the run before is taken away
  if (!studio.run.ready) refresh();
}

/** Show the run and the view of the address, as far as there are such. */
function route() {
  const [place, given] = location.hash.slice(1).split("?"), [asked, id] = place.split("/");
  const wanted = studio.runs.find((each) => encodeURIComponent(each.id) === id) ?? studio.run ?? studio.runs[0];
  if (wanted !== studio.run) choose(wanted.id);
  const names = [...$("views").children].filter((each) => !each.hidden).map((each) => each.dataset.view);
  const name = names.includes(asked) ? asked : names[0];
  history.replaceState(null, "", address(name, studio.run.id));
  if (shown && shown !== name) views[shown].leave?.();
  if (shown !== name) scrollTo(0, 0);
  for (const each of Object.keys(views)) $(each).hidden = each !== name;
  for (const link of $("views").children) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  note("state", studio.run.ready || name === "train" ? "" : `${studio.run.why}.`);
  document.title = `${$("views").querySelector("[aria-current]").textContent} · ${studio.run.name} · nicest studio`;
  shown = name;
  views[name].enter(studio.run);
  if (!given || name !== asked) return;
  try { views[name].restore?.(unpacked(given)); } catch { say("This link is incomplete, so it was ignored."); }
}

setup();
