// Directions from labels: A is moved from the mean code of one label toward that of another.
import { get, latest, post } from "./api.js";
import { $, el, fill, minus, paint, press, sorry, thumbnail } from "./draw.js";

const REACH = 2, lists = latest(), previews = latest(); // of the slider, in ways from mean to mean
let run = null, origin = null, end = 0, wanted = null, changed = () => {}, slider, shown;

export function setup(heard) {
  changed = heard;
  slider = el("input", { type: "range", min: -REACH, max: REACH, step: 0.05, value: 0 });
  shown = el("output");
  $("toward").replaceChildren(el("label", {}, el("canvas", { ariaHidden: "true" }), slider, el("canvas", { ariaHidden: "true" }), shown));
  slider.addEventListener("input", () => { say(); changed(); });
  $("label-start").addEventListener("change", () => { say(); ends(); changed(); });
}

export function choose() {
  lists();
  previews();
  run = origin = wanted = null;
  end = 0;
  $("labels-part").hidden = true;
  $("label-start").replaceChildren();
  back();
}

/** Ask which labels there are: where there are none, there is nothing to see. */
export async function enter(chosen) {
  const fresh = lists();
  try {
    const { means } = await get(`/api/runs/${chosen.id}/labels`);
    if (!fresh() || !means.length) return;
    run = chosen;
    $("labels-part").hidden = false;
    $("label-start").replaceChildren(el("option", { value: "" }, "all labels"), ...means.map((_, i) => el("option", { value: i }, `label ${i}`)));
    fill($("labels"), means.map((each, i) => {
      const tile = thumbnail(run, each, `label ${i}`, () => { toward(i); ends(); changed(); });
      tile.dataset.mark = i;
      return tile;
    }));
    toward(0);
    if (wanted) restore(wanted);
    ends();
    if (direction()) changed();
  } catch (error) { if (fresh()) sorry("moved-note", error, () => enter(chosen)); }
}

/** A is another image now. */
export function follow(given) {
  origin = given;
  ends();
}

/** The slider to the middle, where A is not moved. */
export function back() {
  wanted = null;
  slider.value = 0;
  say();
}

const from = () => ($("label-start").value === "" ? null : Number($("label-start").value));
const asked = (amount) => ({ start: from(), end, amount });

/** What the slider asks for; null where it asks for nothing. */
export const direction = () => (run && Number(slider.value) ? asked(Number(slider.value)) : null);

/** Put the slider where a link had it, now or when the labels are known. */
export function restore(given) {
  wanted = run ? null : given;
  if (!run || !given) return;
  $("label-start").value = given.start ?? "";
  slider.value = Number(given.amount);
  toward($("labels").children[given.end] ? Number(given.end) : 0);
  ends();
}

function toward(label) {
  end = label;
  press($("labels"), $("labels").children[label]);
  say();
}

function say() {
  const value = Number(slider.value), start = from();
  shown.value = minus(`${value < 0 ? "" : "+"}${value.toFixed(2)}`);
  slider.setAttribute("aria-label", `From ${start === null ? "all labels" : `label ${start}`} toward label ${end}`);
}

/** What the slider shows at its ends. */
async function ends() {
  if (!run || !origin) return;
  const fresh = previews(), canvases = $("toward").querySelectorAll("canvas");
  try {
    const found = await Promise.all([-REACH, REACH].map((amount) => post(`/api/runs/${run.id}/move`, { ...origin, direction: asked(amount) })));
    if (fresh()) found.forEach((each, i) => paint(canvases[i], run, each.picture));
  } catch (error) { if (fresh()) sorry("moved-note", error, ends); }
}
