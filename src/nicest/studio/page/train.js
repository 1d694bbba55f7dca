// Train a model here: data that is dropped, what was found in it, and a process of its own that trains.
import { latest, post, send } from "./api.js";
import { $, el, note, paint, sorry, table, waiting, waits } from "./draw.js";

const IMAGE = /\.(png|jpe?g|gif|bmp|webp|tiff?)$/i, TABLE = /\.(csv|parquet|arrow|feather|npy)$/i;
const reads = latest();
let studio, found = null, pictures = [], title = "images";

export function setup(given) {
  studio = given;
  const zone = $("train-drop"), over = (on) => (event) => { event.preventDefault(); zone.classList.toggle("over", on); };
  zone.addEventListener("dragover", over(true));
  zone.addEventListener("dragleave", over(false));
  zone.addEventListener("drop", async (event) => {
    over(false)(event);
    const items = [...event.dataTransfer.items].map((each) => each.webkitGetAsEntry()).filter(Boolean); // before anything is awaited
    take((await Promise.all(items.map(inside))).flat(), items[0]?.name);
  });
  for (const id of ["train-file", "train-folder"]) $(id).addEventListener("change", () => {
    const files = [...$(id).files];
    if (files.length) take(files, files[0].webkitRelativePath?.split("/")[0]);
    $(id).value = "";
  });
  for (const id of ["train-size", "train-colour"]) $(id).addEventListener("change", () => pack());
  $("begin").addEventListener("click", begin);
}

export function enter() {
  $("train-where").textContent = studio.folder;
}

/** All files of a file or folder that was dropped. */
async function inside(entry) {
  if (entry.isFile) return [await new Promise((done, failed) => entry.file(done, failed))];
  const reader = entry.createReader(), all = [];
  for (;;) {
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!some.length) return all;
    for (const each of some) all.push(...await inside(each));
  }
}

function show(what) {
  found = what;
  $("begin").disabled = !found;
  $("train-choices").hidden = !pictures.length;
  if (!found) { $("found").replaceChildren(el("p", { className: "empty" }, "Nothing yet.")); return; }
}

async function take(files, folder) {
  const images = files.filter((each) => IMAGE.test(each.name)), [file] = files.filter((each) => TABLE.test(each.name));
  pictures = [];
  show(null);
  if (images.length > 1) { pictures = images; title = folder || "images"; return measure(); }
  if (!file) return note("train-note", `Expected a .csv, .parquet or .arrow file, or a folder of images; got ${files.length === 1 ? files[0].name : `${files.length} other files`}.`, true);
  const fresh = reads(), ending = file.name.toLowerCase().split(".").pop();
  note("train-note", `Reading ${file.name} …`);
  try {
    if (file.size > studio.limits.body) throw new Error(`${file.name} is larger than ${studio.limits.body / 2 ** 20} MB: use nicest train`);
    const what = await send("/api/train/data", file, { name: file.name, format: ending === "feather" ? "arrow" : ending });
    if (fresh()) present(what);
  } catch (error) { if (fresh()) sorry("train-note", error); }
}

/** Choose size and colours by the first images; people may choose otherwise. */
async function measure() {
  const fresh = reads();
  note("train-note", `Reading ${pictures.length} images …`);
  try {
    const first = await Promise.all(pictures.slice(0, 8).map((each) => createImageBitmap(each)));
    if (!fresh()) return;
    const side = Math.min(...first.map((each) => Math.min(each.width, each.height)));
    $("train-size").value = String([...$("train-size").options].map((each) => Number(each.value)).filter((each) => each <= Math.max(8, side)).at(-1));
    $("train-colour").value = first.some((each) => { const [r, g, b] = planes(each, 8, "colour"); return r.some((value, i) => value !== g[i] || value !== b[i]); }) ? "colour" : "grey";
    await pack();
  } catch { if (fresh()) note("train-note", `One of the images cannot be read: expected a format such as .png or .jpg.`, true); }
}

/** The middle of an image in one size, as one plane of grey or three of colour. */
function planes(bitmap, size, colour) {
  const canvas = new OffscreenCanvas(size, size), pen = canvas.getContext("2d", { willReadFrequently: true }), side = Math.min(bitmap.width, bitmap.height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, size, size);
  const { data } = pen.getImageData(0, 0, size, size), pixels = size * size;
  const plane = (value) => Uint8Array.from({ length: pixels }, (_, i) => value(4 * i));
  if (colour === "colour") return [0, 1, 2].map((c) => plane((k) => data[k + c]));
  return [plane((k) => Math.round(0.299 * data[k] + 0.587 * data[k + 1] + 0.114 * data[k + 2]))];
}

/** Images as one .npy array, as many as a request holds. */
async function pack() {
  if (!pictures.length) return;
  const fresh = reads(), size = Number($("train-size").value), colour = $("train-colour").value, shape = colour === "colour" ? [3, size, size] : [size, size];
  const each = shape.reduce((a, b) => a * b), count = Math.min(pictures.length, Math.floor((studio.limits.body - 1024) / each));
  const text = `{'descr': '|u1', 'fortran_order': False, 'shape': (${[count, ...shape].join(", ")}), }`;
  const head = `\x93NUMPY\x01\x00`, length = 64 * Math.ceil((10 + text.length + 1) / 64) - 10, array = new Uint8Array(10 + length + count * each);
  array.set([...head].map((letter) => letter.charCodeAt(0)));
  array.set([length & 255, length >> 8], 8);
  array.set(new TextEncoder().encode(text.padEnd(length - 1) + "\n"), 10);
  const shown = [];
  try {
    for (let i = 0; i < count; i++) {
      const bitmap = await createImageBitmap(pictures[i]);
      if (!fresh()) return;
      planes(bitmap, size, colour).forEach((plane, c) => array.set(plane, 10 + length + i * each + c * size * size));
      bitmap.close();
      if (i < 24) shown.push(btoa(String.fromCharCode(...array.subarray(10 + length + i * each, 10 + length + (i + 1) * each))));
      if (i % 50 === 0) note("train-note", `Reading image ${i + 1} of ${count} …`);
    }
    const what = await send("/api/train/data", array, { name: title, format: "npy" });
    if (!fresh()) return;
    present(what);
    const look = { shape, dtype: "uint8", brightest: 255 };
    $("found").append(el("div", { className: "wall big plain" }, ...shown.map((picture) => paint(el("canvas"), look, picture))));
    if (count < pictures.length) note("train-note", `The first ${count} of ${pictures.length} images: more do not fit into one request. Choose a smaller size, or use nicest train.`);
  } catch (error) { if (fresh()) { show(null); sorry("train-note", error.status === undefined ? new Error("One of the images cannot be read: expected a format such as .png or .jpg.") : error); } }
}

function present(what) {
  show(what);
  $("train-name").value = what.name;
  const range = (each) => (each.kind === "category" ? `${each.values.join(", ")}${each.distinct > each.values.length ? `, … ${each.distinct} in all` : ""}` : `${each.low} to ${each.high}`);
  const words = what.kind === "table" ? `${what.rows} rows of ${what.columns.length} columns${what.incomplete ? `, ${what.incomplete} of them with missing values` : ""}.` : `${what.rows} ${what.shape.length === 3 ? "colour" : "grey"} images of ${what.shape.at(-1)} by ${what.shape.at(-2)} pixels.`;
  const parts = [el("p", {}, words), ...what.warnings.map((each) => el("p", { className: "hint" }, each))];
  if (what.kind === "table") {
    const box = (label, content) => { const made = el("div", { className: "scroll", tabIndex: 0 }, content); made.setAttribute("role", "region"); made.setAttribute("aria-label", label); return made; };
    parts.push(box("The columns", table(["column", "kind", "range or values"], what.columns.map((each) => [each.name, each.kind, range(each)]))));
    parts.push(el("h2", {}, "The first rows"), box("The first rows", table(what.columns.map((each) => each.name), what.preview)));
  }
  $("found").replaceChildren(...parts);
  note("train-note", "");
}

async function begin() {
  if (waiting($("begin")) || !found) return;
  const name = $("train-name").value.trim();
  if (!name) { note("begin-note", "Enter a name for the model.", true); return $("train-name").focus(); }
  waits($("begin"), true);
  note("begin-note", "Starting …");
  try {
    const { run } = await post("/api/train", { id: found.id, name, effort: $("train-effort").value });
    note("begin-note", "");
    pictures = [];
    show(null);
    await studio.show("training", run);
  } catch (error) { sorry("begin-note", error); }
  waits($("begin"), false);
}
