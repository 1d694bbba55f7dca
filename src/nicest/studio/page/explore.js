// Images and their codes: one moved, the way between two, the plane through three, and a sphere.
import { get, latest, post } from "./api.js";
import { $, el, fill, minus, nats, note, number, paint, press, segments, size, soon, sorry, thumbnail } from "./draw.js";
import * as labels from "./labels.js";

const walls = latest(), moves = latest(), ways = latest(), spheres = latest(), planes = latest(), kinds = latest();
const REACH = [-0.25, 1.25], GRID = 7; // of the plane, from A at (0, 0) to B at (1, 0) and C at (0, 1)
let studio, run = null, picks = { a: null, b: null, c: null }, slot = "a", way = "straight", basis = "random", seed = 0, ball = null;
let view = { turn: 0.4, tilt: 0.35 }, waiting = null, running = false, placed = null, source = "samples";
let sheet = null, spot = [0.33, 0.33], wish = null, walking = false, wanted = null; // what a link asks for, until it is shown

export function setup(given) {
  studio = given;
  segments("walls", "wall", (value) => { source = value; wall(); });
  const redraw = soon(() => { if (run) wall(); });
  $("temperature").addEventListener("input", () => { $("temperature-value").value = Number($("temperature").value).toFixed(2); redraw(); });
  $("seed").addEventListener("change", wall);
  $("redraw").addEventListener("click", () => { $("seed").value = Math.floor(Math.random() * 1e6); wall(); });
  segments("pick", "pick", (value) => { slot = value; $("globe-slot").value = slot.toUpperCase(); });
  segments("ways", "way", (value) => { way = value; between(); plane(); });
  segments("bases", "basis", (value) => { basis = value; $("other-sphere").disabled = basis === "top"; sphere(); });
  $("other-sphere").addEventListener("click", () => { seed += 1; sphere(); });
  $("reset").addEventListener("click", position);
  $("keep").addEventListener("input", () => { keepValue(); move(); });
  labels.setup(() => move());
  turning();
  strolling();
  new ResizeObserver(() => globe()).observe($("globe"));
  new ResizeObserver(() => map()).observe($("plane"));
}

export function choose(chosen) {
  for (const each of [walls, moves, ways, spheres, planes, kinds]) each();
  run = placed = waiting = ball = sheet = wish = wanted = null;
  picks = { a: null, b: null, c: null };
  source = "samples";
  press($("walls"), $("walls").firstElementChild);
  for (const id of ["wall", "sliders", "between", "classes"]) $(id).replaceChildren();
  for (const id of ["moved", "globe", "plane", "plane-picture"]) $(id).width = $(id).height = 1;
  for (const id of ["moved-nats", "moved-radius", "moved-typical", "plane-nats", "plane-shares"]) $(id).textContent = "–";
  for (const id of ["wall-note", "moved-note", "between-note", "globe-note", "plane-note", "classes-note"]) note(id, "");
  $("classes-part").hidden = !chosen.classes;
  labels.choose();
  usable();
}

/** All that is shown: the picks, the sliders, the walk and the sphere. */
export function state() {
  return { picks, places: places(), keep: Number($("keep").value), temperature: $("temperature").value, seed: $("seed").value, way, basis, axes: seed, spot, view, direction: labels.direction() };
}

export function restore(given) {
  wanted = { picks: given.picks, places: given.places.map(Number), keep: Number(given.keep), direction: given.direction ?? null };
  $("temperature").value = String(given.temperature);
  $("temperature-value").value = Number($("temperature").value).toFixed(2);
  $("seed").value = String(given.seed);
  [way, basis, seed] = [given.way === "spherical" ? "spherical" : "straight", given.basis === "top" ? "top" : "random", Math.max(0, Math.floor(Number(given.axes)) || 0)];
  press($("ways"), $("ways").querySelector(`[data-way=${way}]`));
  press($("bases"), $("bases").querySelector(`[data-basis=${basis}]`));
  spot = given.spot.map(Number);
  view = { turn: Number(given.view.turn), tilt: Number(given.view.tilt) };
  wall();
  sphere();
}

export function enter(chosen) {
  if (run === chosen) { if (source === "own") wall(); return; }
  run = chosen;
  $("keep").max = run.dim; // before the value, which would be cut to it
  $("keep").value = run.dim;
  keepValue();
  $("between").replaceChildren(...Array.from({ length: 9 }, () => el("canvas")));
  wall();
  sphere();
  labels.enter(run);
}

/** What moves a pick waits until there is one. */
function usable() {
  for (const each of [$("keep"), $("reset"), ...$("ways").children, ...$("pick").children]) each.disabled = !picks.a;
}

/** The images to pick from: samples with the codes that made them, or pictures. */
async function wall() {
  $("wall-settings").hidden = source !== "samples";
  if (source !== "samples") return pictures();
  const given = { n: 64, temperature: $("temperature").value, seed: number($("seed"), "wall-note", "Seed") };
  if (given.seed === null) return;
  const fresh = walls();
  note("wall-note", "Drawing …");
  try {
    const found = await get(`/api/runs/${run.id}/samples`, given);
    if (!fresh()) return;
    const origin = (index) => ({ sample: { seed: given.seed, temperature: Number(given.temperature), index } }); // the code that made it
    tiles(found.pictures, (i) => `sample ${i + 1}, ${nats(found.nats[i])}`, origin);
    note("wall-note", "");
    picks = wanted?.picks ?? { a: origin(0), b: origin(1), c: origin(2) };
    mark();
    walk();
  } catch (error) { if (fresh()) sorry("wall-note", error, wall); }
}

async function pictures() {
  const fresh = walls(), own = source === "own";
  note("wall-note", "Loading …");
  try {
    if (!own && run.data) throw new Error(`No test images: ${run.data}`);
    const found = own ? studio.own.map((each) => each.picture) : (await get(`/api/runs/${run.id}/pictures`, { n: 64 })).pictures;
    if (!fresh()) return;
    tiles(found, (i) => (own ? studio.own[i].name : `test image ${i + 1}`), (i) => ({ picture: found[i] }));
    note("wall-note", own ? "Images that you draw or upload under Score appear here." : "");
    mark();
  } catch (error) { if (fresh()) { $("wall").replaceChildren(); sorry("wall-note", error, wall); } }
}

function tiles(found, name, origin) {
  if (!found.length) return $("wall").replaceChildren();
  fill($("wall"), found.map((each, i) => {
    const tile = thumbnail(run, each, name(i), () => pick(origin(i)));
    tile.dataset.origin = JSON.stringify(origin(i));
    return tile;
  }));
}

/** Show on the wall which images are picked. */
function mark() {
  for (const each of $("wall").children) {
    const marks = Object.keys(picks).filter((key) => JSON.stringify(picks[key]) === each.dataset.origin).join(" ").toUpperCase();
    each.setAttribute("aria-pressed", String(Boolean(marks)));
    if (marks) each.dataset.mark = marks;
    else delete each.dataset.mark;
  }
  usable();
}

function pick(origin) {
  picks[slot] = origin;
  mark();
  walk(slot);
}

/** What depends on the picks, or on one of them. */
function walk(changed = "a") {
  if (changed === "a") { position(); classes(); }
  if (changed !== "c") between();
  plane();
}

async function classes() {
  if (!run.classes) return;
  const fresh = kinds();
  try {
    const found = await post(`/api/runs/${run.id}/classes`, picks.a);
    if (!fresh()) return;
    $("classes").replaceChildren(...found.pictures.map((each, i) => {
      const canvas = paint(el("canvas"), run, each);
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `the code of A as label ${i}`);
      canvas.title = nats(found.nats[i]);
      return el("figure", {}, canvas, el("figcaption", {}, String(i)));
    }));
    note("classes-note", "One code, decoded for every label.");
  } catch (error) { if (fresh()) sorry("classes-note", error, classes); }
}

/** Where the pick is: its first components become the places of the sliders. */
async function position() {
  const fresh = moves(), asked = picks.a;
  placed = waiting = null;
  $("keep").value = run.dim;
  keepValue();
  labels.back();
  try {
    const found = await post(`/api/runs/${run.id}/move`, { ...asked, ends: true });
    if (!fresh()) return;
    placed = asked;
    labels.follow(asked);
    const count = Math.min(12, found.places.length);
    if ($("sliders").children.length !== count) sliders(count);
    [...$("sliders").children].forEach((label, i) => {
      const [name, low, input, high, output] = label.children;
      [low, high].forEach((canvas, end) => paint(canvas, run, found.ends[i][end]));
      name.textContent = `h${i + 1}`;
      label.title = `component ${i + 1}: standard deviation ${found.sigma[i].toPrecision(3)}`;
      input.value = found.places[i];
      Object.assign(input.dataset, { own: input.value, exact: found.places[i] }); // as the slider rounds it, and as it is
      output.value = signed(found.places[i]);
    });
    present(found);
    if (!wanted) return;
    [...$("sliders").children].forEach((label, i) => { if (i in wanted.places) { label.children[2].value = wanted.places[i]; label.children[4].value = signed(wanted.places[i]); } });
    $("keep").value = wanted.keep;
    keepValue();
    labels.restore(wanted.direction);
    wanted = null;
    move();
  } catch (error) { if (fresh()) sorry("moved-note", error, position); }
}

function sliders(count) {
  $("sliders").replaceChildren(...Array.from({ length: count }, (_, i) => {
    const input = el("input", { type: "range", min: -4, max: 4, step: 0.05 });
    input.setAttribute("aria-label", `component ${i + 1}, in standard deviations`);
    const output = el("output");
    input.addEventListener("input", () => { output.value = signed(Number(input.value)); move(); });
    return el("label", {}, el("span"), el("canvas", { ariaHidden: "true" }), input, el("canvas", { ariaHidden: "true" }), output);
  }));
}

const signed = (value) => minus(`${value < 0 ? "" : "+"}${value.toFixed(2)}`);
function keepValue() { $("keep-value").value = `${$("keep").value} of ${run.dim}`; }

/** The components up to the last that a slider has moved. */
function places() {
  const inputs = [...$("sliders").querySelectorAll("input")], last = inputs.findLastIndex((each) => each.value !== each.dataset.own);
  return inputs.slice(0, last + 1).map((each) => Number(each.value === each.dataset.own ? each.dataset.exact : each.value));
}

/** Ask for the picture of the sliders; while one answer is on its way, only the newest wish is kept. */
async function move() {
  if (!placed || placed !== picks.a) return;
  waiting = { ...picks.a, places: places() };
  if (Number($("keep").value) < run.dim) waiting.keep = Number($("keep").value);
  if (labels.direction()) waiting.direction = labels.direction();
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

// The plane through the three picks: a map of it, and the picture of the point below the pointer.

const among = (t) => REACH[0] + (REACH[1] - REACH[0]) * t;

async function plane() {
  if (!picks.c) return;
  const fresh = planes(), corners = [picks.a, picks.b, picks.c];
  const points = Array.from({ length: GRID * GRID }, (_, k) => [among(((k % GRID) + 0.5) / GRID), among(1 - (Math.floor(k / GRID) + 0.5) / GRID)]);
  sheet = null;
  try {
    const found = await post(`/api/runs/${run.id}/plane`, { corners, points, way });
    if (!fresh()) return;
    sheet = { corners, way, tiles: found.pictures.map((each) => paint(el("canvas"), run, each)) };
    note("plane-note", "");
    map();
    stroll();
  } catch (error) { if (fresh()) sorry("plane-note", error, plane); }
}

function map() {
  const canvas = $("plane"), { width, height } = canvas.getBoundingClientRect();
  if (!sheet || !width) return;
  const fine = devicePixelRatio || 1, [w, h] = [width * fine, height * fine];
  Object.assign(canvas, { width: w, height: h });
  const pen = canvas.getContext("2d"), at = ([u, v]) => [w * (u - REACH[0]) / (REACH[1] - REACH[0]), h * (1 - (v - REACH[0]) / (REACH[1] - REACH[0]))];
  pen.imageSmoothingEnabled = false;
  sheet.tiles.forEach((tile, k) => pen.drawImage(tile, (k % GRID) * w / GRID + 2 * fine, Math.floor(k / GRID) * h / GRID + 2 * fine, w / GRID - 4 * fine, h / GRID - 4 * fine));
  Object.assign(pen, { font: `600 ${13 * fine}px system-ui, sans-serif`, textAlign: "center", textBaseline: "middle" });
  [["A", [0, 0]], ["B", [1, 0]], ["C", [0, 1]]].forEach(([name, place]) => {
    const [x, y] = at(place);
    pen.fillStyle = "#b82f45";
    pen.beginPath(); pen.arc(x, y, 11 * fine, 0, 7); pen.fill();
    pen.fillStyle = "#fff";
    pen.fillText(name, x, y + fine);
  });
  const [x, y] = at(spot);
  for (const [line, wide] of [["#000", 5], ["#fff", 2]]) {
    Object.assign(pen, { strokeStyle: line, lineWidth: wide * fine });
    pen.beginPath(); pen.arc(x, y, 8 * fine, 0, 7); pen.stroke();
  }
}

function strolling() {
  const canvas = $("plane"), go = (u, v) => { spot = [u, v].map((each) => Math.min(REACH[1], Math.max(REACH[0], each))); requestAnimationFrame(map); stroll(); };
  for (const each of ["pointerdown", "pointermove"]) canvas.addEventListener(each, (event) => {
    const box = canvas.getBoundingClientRect();
    go(among((event.clientX - box.left) / box.width), among(1 - (event.clientY - box.top) / box.height));
  });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-0.05, 0], ArrowRight: [0.05, 0], ArrowUp: [0, 0.05], ArrowDown: [0, -0.05] }[event.key];
    if (by) { event.preventDefault(); go(spot[0] + by[0], spot[1] + by[1]); }
  });
}

/** The picture of the point; while one answer is on its way, only the newest wish is kept. */
async function stroll() {
  wish = spot;
  if (walking || !sheet) return;
  walking = true;
  while (wish && sheet) {
    const asked = wish, { corners, way, tiles } = sheet;
    wish = null;
    try {
      const found = await post(`/api/runs/${run.id}/plane`, { corners, points: [asked], way });
      if (sheet?.tiles !== tiles) continue;
      paint($("plane-picture"), run, found.pictures[0]);
      $("plane-nats").textContent = nats(found.nats[0]);
      $("plane-shares").textContent = [1 - asked[0] - asked[1], ...asked].map((each) => minus((Math.round(100 * each) / 100).toFixed(2))).join(", ");
    } catch (error) { if (sheet?.tiles === tiles) sorry("plane-note", error, stroll); }
  }
  walking = false;
}

// The sphere: its images are fetched once and turned here.

async function sphere() {
  const fresh = spheres();
  note("globe-note", "Decoding the sphere …");
  try {
    const found = await get(`/api/runs/${run.id}/sphere`, { basis, seed, n: 220 });
    if (!fresh()) return;
    ball = { basis, seed, points: found.points, tiles: found.pictures.map((each) => paint(el("canvas"), run, each)) };
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
  ball.places = []; // of the tiles that are seen, the front ones last
  for (const { i, x, y, depth } of placed) {
    if (depth < -0.2) continue;
    const side = base * (0.55 + 0.45 * depth), tall = side * Math.min(1, h / w), wide = side * Math.min(1, w / h);
    ball.places.push({ i, x: (canvas.width / 2 + radius * x) / fine, y: (canvas.height / 2 - radius * y) / fine, reach: side / fine / 2 });
    pen.globalAlpha = Math.min(1, Math.max(0.08, 0.45 + 0.75 * depth));
    pen.drawImage(ball.tiles[i], canvas.width / 2 + radius * x - wide / 2, canvas.height / 2 - radius * y - tall / 2, wide, tall);
  }
  pen.globalAlpha = 1;
}

function turning() {
  const canvas = $("globe");
  let last = null, first = null;
  canvas.addEventListener("pointerdown", (event) => { if (event.button || !event.isPrimary) return; canvas.setPointerCapture(event.pointerId); last = first = event; });
  canvas.addEventListener("pointerup", (event) => {
    if (!first || Math.hypot(event.clientX - first.clientX, event.clientY - first.clientY) > 4) return; // it was dragged
    const box = canvas.getBoundingClientRect();
    takeOver(event.clientX - box.left, event.clientY - box.top);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!last) return;
    turn((event.clientX - last.clientX) * 0.008, (event.clientY - last.clientY) * 0.008);
    last = event;
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { last = null; });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, -0.15], ArrowDown: [0, 0.15] }[event.key];
    if (by) { event.preventDefault(); turn(...by); }
    if (event.key === "Enter") { event.preventDefault(); takeOver(canvas.clientWidth / 2, canvas.clientHeight / 2); }
  });
}

/** The image of the sphere at a place becomes a pick. */
function takeOver(x, y) {
  const found = ball?.places?.findLast((each) => Math.abs(each.x - x) <= each.reach && Math.abs(each.y - y) <= each.reach);
  if (!found) return;
  pick({ sphere: { basis: ball.basis, seed: ball.seed, n: ball.points.length, index: found.i } });
  note("globe-note", `Image ${found.i + 1} of the sphere is ${slot.toUpperCase()} now.`);
}

function turn(across, down) {
  view = { turn: view.turn - across, tilt: Math.min(1.5, Math.max(-1.5, view.tilt + down)) };
  requestAnimationFrame(globe);
}
