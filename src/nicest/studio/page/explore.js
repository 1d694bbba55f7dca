// Samples, the code of one of them, the way between two, and a sphere.
import { get, latest, post } from "./api.js";
import { $, el, fill, minus, nats, note, number, paint, segments, size, soon, sorry, thumbnail } from "./draw.js";

const walls = latest(), moves = latest(), ways = latest(), spheres = latest();
let run = null, picks = { a: null, b: null }, slot = "a", way = "straight", basis = "random", seed = 0, ball = null;
let view = { turn: 0.4, tilt: 0.35 }, waiting = null, running = false, placed = null, tiles = { a: null, b: null };

export function setup() {
  const redraw = soon(() => { if (run) wall(); });
  $("temperature").addEventListener("input", () => { $("temperature-value").value = Number($("temperature").value).toFixed(2); redraw(); });
  $("seed").addEventListener("change", wall);
  $("redraw").addEventListener("click", () => { $("seed").value = Math.floor(Math.random() * 1e6); wall(); });
  segments("pick", "pick", (value) => { slot = value; });
  segments("ways", "way", (value) => { way = value; between(); });
  segments("bases", "basis", (value) => { basis = value; $("other-sphere").disabled = basis === "top"; sphere(); });
  $("other-sphere").addEventListener("click", () => { seed += 1; sphere(); });
  $("reset").addEventListener("click", position);
  $("keep").addEventListener("input", () => { keepValue(); move(); });
  turning();
  new ResizeObserver(() => globe()).observe($("globe"));
}

export function choose() {
  for (const each of [walls, moves, ways, spheres]) each();
  run = placed = waiting = ball = null;
  picks = { a: null, b: null };
  for (const id of ["wall", "sliders", "between"]) $(id).replaceChildren();
  for (const id of ["moved", "globe"]) $(id).width = $(id).height = 1;
  for (const id of ["moved-nats", "moved-radius", "moved-typical"]) $(id).textContent = "–";
  for (const id of ["wall-note", "moved-note", "between-note", "globe-note"]) note(id, "");
  usable();
}

export function enter(chosen) {
  if (run === chosen) return;
  run = chosen;
  $("keep").max = run.dim; // before the value, which would be cut to it
  $("keep").value = run.dim;
  keepValue();
  $("between").replaceChildren(...Array.from({ length: 9 }, () => el("canvas")));
  wall();
  sphere();
}

/** What moves a pick waits until there is one. */
function usable() {
  for (const each of [$("keep"), $("reset"), ...$("ways").children, ...$("pick").children]) each.disabled = !picks.a;
}

async function wall() {
  const given = { n: 64, temperature: $("temperature").value, seed: number($("seed"), "wall-note", "Seed") };
  if (given.seed === null) return;
  const fresh = walls();
  note("wall-note", "Drawing …");
  try {
    const found = await get(`/api/runs/${run.id}/samples`, given);
    if (!fresh()) return;
    const origin = (index) => ({ sample: { seed: given.seed, temperature: Number(given.temperature), index } }); // the code that made it
    fill($("wall"), found.pictures.map((each, i) => thumbnail(run, each, `sample ${i + 1}, ${nats(found.nats[i])}`, (button) => pick(button, origin(i)))));
    note("wall-note", "");
    const [first, second] = $("wall").children;
    mark(first, "a", origin(0));
    mark(second, "b", origin(1));
    position();
    between();
  } catch (error) { if (fresh()) sorry("wall-note", error, wall); }
}

function mark(button, name, origin) {
  tiles[name] = button;
  picks[name] = origin;
  for (const each of $("wall").children) {
    const marks = ["a", "b"].filter((key) => tiles[key] === each).join(" ").toUpperCase();
    each.setAttribute("aria-pressed", String(Boolean(marks)));
    if (marks) each.dataset.mark = marks;
    else delete each.dataset.mark;
  }
  usable();
}

function pick(button, origin) {
  mark(button, slot, origin);
  if (slot === "a") position();
  between();
}

/** Where the pick is: its first components become the places of the sliders. */
async function position() {
  const fresh = moves(), asked = picks.a;
  placed = waiting = null;
  $("keep").value = run.dim;
  keepValue();
  try {
    const found = await post(`/api/runs/${run.id}/move`, asked);
    if (!fresh()) return;
    placed = asked;
    const count = Math.min(12, found.places.length);
    if ($("sliders").children.length !== count) sliders(count);
    [...$("sliders").children].forEach((label, i) => {
      const [name, input, output] = label.children;
      name.textContent = `h${i + 1}`;
      label.title = `component ${i + 1}: standard deviation ${found.sigma[i].toPrecision(3)}`;
      input.value = found.places[i];
      input.dataset.own = found.places[i];
      output.value = signed(found.places[i]);
    });
    present(found);
  } catch (error) { if (fresh()) sorry("moved-note", error, position); }
}

function sliders(count) {
  $("sliders").replaceChildren(...Array.from({ length: count }, (_, i) => {
    const input = el("input", { type: "range", min: -4, max: 4, step: 0.05 });
    input.setAttribute("aria-label", `component ${i + 1}, in standard deviations`);
    const output = el("output");
    input.addEventListener("input", () => { output.value = signed(Number(input.value)); move(); });
    return el("label", {}, el("span"), input, output);
  }));
}

const signed = (value) => minus(`${value < 0 ? "" : "+"}${value.toFixed(2)}`);
function keepValue() { $("keep-value").value = `${$("keep").value} of ${run.dim}`; }

/** Ask for the picture of the sliders; while one answer is on its way, only the newest wish is kept. */
async function move() {
  if (!placed || placed !== picks.a) return;
  const inputs = [...$("sliders").querySelectorAll("input")];
  const moved = inputs.findLastIndex((each) => each.value !== String(Number(each.dataset.own)));
  waiting = { ...picks.a, places: inputs.slice(0, moved + 1).map((each) => Number(each.value)) };
  if (Number($("keep").value) < run.dim) waiting.keep = Number($("keep").value);
  if (running) return;
  running = true;
  while (waiting) {
    const ask = waiting, fresh = moves();
    waiting = null;
    try {
      const found = await post(`/api/runs/${run.id}/move`, ask);
      if (fresh()) present(found);
    } catch (error) { if (fresh()) sorry("moved-note", error, move); }
  }
  running = false;
}

function present(found) {
  paint($("moved"), run, found.picture);
  $("moved-nats").textContent = nats(found.nats);
  $("moved-radius").textContent = `${found.radius.toFixed(1)} sd`;
  $("moved-typical").textContent = `near ${found.typical_radius.toFixed(1)} sd`;
  note("moved-note", "");
}

async function between() {
  if (!picks.a || !picks.b) return;
  const fresh = ways();
  try {
    const found = await post(`/api/runs/${run.id}/between`, { start: picks.a, end: picks.b, count: 9, way });
    if (!fresh()) return;
    [...$("between").children].forEach((canvas, i) => { paint(canvas, run, found.pictures[i]); canvas.title = nats(found.nats[i]); });
    note("between-note", `From ${nats(found.nats[0])} to ${nats(found.nats[8])}; in the middle ${nats(found.nats[4])}.`);
  } catch (error) { if (fresh()) sorry("between-note", error, between); }
}

// The sphere: its images are fetched once and turned here.

async function sphere() {
  const fresh = spheres();
  note("globe-note", "Decoding the sphere …");
  try {
    const found = await get(`/api/runs/${run.id}/sphere`, { basis, seed, n: 220 });
    if (!fresh()) return;
    ball = { points: found.points, tiles: found.pictures.map((each) => paint(el("canvas"), run, each)) };
    note("globe-note", `${found.points.length} codes, each ${found.radius.toFixed(1)} sd from the mode.`);
    globe();
  } catch (error) { if (fresh()) sorry("globe-note", error, sphere); }
}

function globe() {
  const canvas = $("globe"), { width, height } = canvas.getBoundingClientRect();
  if (!ball || !width) return;
  const fine = devicePixelRatio || 1;
  canvas.width = width * fine;
  canvas.height = height * fine;
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  const radius = 0.43 * Math.min(width, height) * fine, [h, w] = size(run), base = 3.2 * radius / Math.sqrt(ball.points.length);
  const [c, s, ct, st] = [Math.cos(view.turn), Math.sin(view.turn), Math.cos(view.tilt), Math.sin(view.tilt)];
  const placed = ball.points.map(([x, y, z], i) => {
    const across = -s * x + c * y, toward = c * x + s * y;
    return { i, x: across, y: ct * z - st * toward, depth: ct * toward + st * z };
  }).sort((a, b) => a.depth - b.depth);
  for (const { i, x, y, depth } of placed) {
    if (depth < -0.2) continue;
    const side = base * (0.55 + 0.45 * depth), tall = side * Math.min(1, h / w), wide = side * Math.min(1, w / h);
    pen.globalAlpha = Math.min(1, Math.max(0.08, 0.45 + 0.75 * depth));
    pen.drawImage(ball.tiles[i], canvas.width / 2 + radius * x - wide / 2, canvas.height / 2 - radius * y - tall / 2, wide, tall);
  }
  pen.globalAlpha = 1;
}

function turning() {
  const canvas = $("globe");
  let last = null;
  canvas.addEventListener("pointerdown", (event) => { if (event.button || !event.isPrimary) return; canvas.setPointerCapture(event.pointerId); last = event; });
  canvas.addEventListener("pointermove", (event) => {
    if (!last) return;
    turn((event.clientX - last.clientX) * 0.008, (event.clientY - last.clientY) * 0.008);
    last = event;
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { last = null; });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, -0.15], ArrowDown: [0, 0.15] }[event.key];
    if (by) { event.preventDefault(); turn(...by); }
  });
}

function turn(across, down) {
  view = { turn: view.turn - across, tilt: Math.min(1.5, Math.max(-1.5, view.tilt + down)) };
  requestAnimationFrame(globe);
}
