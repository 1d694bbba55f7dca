// The frame of the page: which run, which view, and whether the server is there.
import { get, onConnection } from "./api.js";
import { $, el, note } from "./draw.js";
import * as explore from "./explore.js";
import * as inpaint from "./inpaint.js";
import * as score from "./score.js";
import * as table from "./table.js";
import * as training from "./training.js";

const views = { inpaint, explore, score, table, training };
const studio = { run: null, limits: null, masks: [] };
let shown = null;

async function start() {
  onConnection((there) => {
    $("banner").hidden = there;
    $("banner").textContent = there ? "" : "The server does not answer. Is nicest studio still running? Trying again …";
  });
  for (const view of Object.values(views)) view.setup(studio);
  let found;
  try { found = await get("/api/runs"); } catch (error) {
    note("state", error.message, true);
    setTimeout(() => location.reload(), 3000);
    return;
  }
  Object.assign(studio, { limits: found.limits, masks: found.masks, runs: found.runs });
  $("version").textContent = `nicest ${found.version}`;
  const select = $("run");
  select.replaceChildren(...found.runs.map((run) => el("option", { value: run.id }, label(run))));
  select.disabled = found.runs.length < 2;
  select.addEventListener("change", () => choose(select.value));
  addEventListener("hashchange", route);
  choose(found.runs[0].id);
}

const label = (run) => (run.name === run.dataset || !run.dataset ? run.name : `${run.name} (${run.dataset})`);

function choose(id) {
  if (shown) views[shown].leave?.();
  shown = null;
  studio.run = studio.runs.find((each) => each.id === id);
  const [height, width] = studio.run.shape.length > 1 ? studio.run.shape.slice(-2) : [1, 1];
  document.documentElement.style.setProperty("--ratio", `${width} / ${height}`);
  for (const link of $("views").children) link.hidden = Boolean(link.dataset.for) && !link.dataset.for.split(" ").includes(studio.run.kind);
  for (const view of Object.values(views)) view.choose?.(studio.run);
  route();
}

function route() {
  const links = [...$("views").children].filter((each) => !each.hidden);
  const asked = location.hash.slice(1);
  const name = links.some((each) => each.hash === `#${asked}`) ? asked : links[0].hash.slice(1);
  if (shown && shown !== name) views[shown].leave?.();
  for (const each of Object.keys(views)) $(each).hidden = each !== name;
  for (const link of $("views").children) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  note("state", studio.run.ready ? "" : `${studio.run.why}. The curves are shown as they grow.`);
  shown = name;
  views[name].enter(studio.run);
}

start();
