// Samples, the code of one of them, the way between two, and a sphere.
import { get, post } from "./api.js";
import { $, el, nats, note, paint, press, segments, size, thumbnail } from "./draw.js";

let run = null, picks = { a: null, b: null }, slot = "a", way = "straight", basis = "random", seed = 0, ball = null;
let view = { turn: 0.4, tilt: 0.35 }, waiting = null, running = false, drawing = 0;

export function setup() {
  $("temperature").addEventListener("input", () => { $("temperature-value").value = Number($("temperature").value).toFixed(2); soon(wall); });
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

export function choose() { run = null; picks = { a: null, b: null }; ball = null; $("sliders").replaceChildren(); }

export function enter(chosen) {
  if (run === chosen) return;
  run = chosen;
  $("keep").max = $("keep").value = run.dim;
  keepValue();
  $("between").replaceChildren(...Array.from({ length: 9 }, () => el("canvas")));
  wall();
  sphere();
}

let timer = 0;
function soon(work) { clearTimeout(timer); timer = setTimeout(work, 120); }

async function wall() {
  const mine = ++drawing;
  note("wall-note", "Drawing …");
  try {
    const given = { n: 64, temperature: $("temperature").value, seed: Math.max(0, Number($("seed").value) || 0) };
    const found = await get(`/api/runs/${run.id}/samples`, given);
    if (mine !== drawing) return;
    $("wall").replaceChildren(...found.pictures.map((each, i) => thumbnail(run, each, `sample ${i + 1}, ${nats(found.nats[i])}`, pick)));
    note("wall-note", "");
    const [first, second] = $("wall").children;
    mark(first, "a", found.pictures[0]);
    mark(second, "b", found.pictures[1]);
    position();
    between();
  } catch (error) { note("wall-note", error.message, true); }
}

function mark(button, name, picture) {
  for (const each of $("wall").children) if (each.dataset.mark === name.toUpperCase()) { delete each.dataset.mark; each.setAttribute("aria-pressed", "false"); }
  button.dataset.mark = name.toUpperCase();
  button.setAttribute("aria-pressed", "true");
  picks[name] = picture;
}

function pick(button, picture) {
  mark(button, slot, picture);
  if (slot === "a") position();
  between();
}

/** Where the pick is: its first components become the places of the sliders. */
async function position() {
  $("keep").value = run.dim;
  keepValue();
  try {
    const found = await post(`/api/runs/${run.id}/move`, { picture: picks.a });
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
  } catch (error) { note("moved-note", error.message, true); }
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

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
function keepValue() { $("keep-value").value = `${$("keep").value} of ${run.dim}`; }

/** Ask for the picture of the sliders; while one answer is on its way, only the newest wish is kept. */
async function move() {
  const inputs = [...$("sliders").querySelectorAll("input")];
  const moved = inputs.findLastIndex((each) => each.value !== String(Number(each.dataset.own)));
  waiting = { picture: picks.a, places: inputs.slice(0, moved + 1).map((each) => Number(each.value)) };
  if (Number($("keep").value) < run.dim) waiting.keep = Number($("keep").value);
  if (running) return;
  running = true;
  while (waiting) {
    const ask = waiting;
    waiting = null;
    try { present(await post(`/api/runs/${run.id}/move`, ask)); } catch (error) { note("moved-note", error.message, true); }
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
  try {
    const found = await post(`/api/runs/${run.id}/between`, { start: picks.a, end: picks.b, count: 9, way });
    [...$("between").children].forEach((canvas, i) => { paint(canvas, run, found.pictures[i]); canvas.title = nats(found.nats[i]); });
    note("between-note", `From ${nats(found.nats[0])} to ${nats(found.nats[8])}; in the middle ${nats(found.nats[4])}.`);
  } catch (error) { note("between-note", error.message, true); }
}

// The sphere: its images are fetched once and turned here.

async function sphere() {
  const asked = run;
  note("globe-note", "Decoding the sphere …");
  try {
    const found = await get(`/api/runs/${run.id}/sphere`, { basis, seed, n: 220 });
    if (asked !== run) return;
    ball = { points: found.points, tiles: found.pictures.map((each) => paint(el("canvas"), run, each)) };
    note("globe-note", `${found.points.length} codes at distance ${found.radius.toFixed(1)} from the mode, in units of the prior's scale.`);
    globe();
  } catch (error) { note("globe-note", error.message, true); }
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
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); last = event; });
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
