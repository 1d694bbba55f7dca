// The server, in three calls: ask for JSON, send a file, follow a stream of events.

export class Refusal extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

const GONE = "The server does not answer. Is nicest studio still running?";
const listeners = [], undone = new Map();
let connected = true, forms = new Map(), changed = () => {};
export const onConnection = (heard) => listeners.push(heard);

/** The forms that the models of runs are expected to have; `onChange` hears when one has another, or none any more. */
export const expectForms = (runs) => { forms = new Map(runs.map((each) => [`/api/runs/${each.id}/`, each.form])); };
export const onChange = (heard) => { changed = heard; };

/** What to do again when the server is back: one thing for each place of the page. */
export const whenBack = (place, work) => undone.set(place, work);
export const forget = () => undone.clear();

/** Only the latest answer counts: each call begins anew, and gives a function that says whether it is still the last. */
export function latest() {
  let count = 0;
  return () => { const mine = ++count; return () => mine === count; };
}

function connection(now) {
  if (now === connected) return;
  connected = now;
  listeners.forEach((heard) => heard(now));
  if (!now) return again();
  const works = [...undone.values()];
  forget();
  works.forEach((work) => work());
}

async function again() {
  while (!connected) {
    await new Promise((done) => setTimeout(done, 2000));
    try { if ((await fetch("/api/status")).ok) connection(true); } catch { /* still gone */ }
  }
}

async function call(path, options = {}) {
  let answer;
  const form = forms.get(path.match(/^\/api\/runs\/[^/]+\//)?.[0]), headers = { ...options.headers, ...(form ? { "nicest-form": form } : {}) };
  try { answer = await fetch(path, { ...options, headers }); } catch (error) {
    if (error.name === "AbortError") throw error;
    connection(false);
    throw new Refusal(GONE, 0);
  }
  connection(true);
  if (answer.ok) return answer;
  let said = `the server answered ${answer.status}`;
  try { said = (await answer.json()).error ?? said; } catch { /* no JSON */ }
  if (answer.status === 409) changed();
  throw new Refusal(said, answer.status);
}

const query = (given) => (given ? `?${new URLSearchParams(given)}` : "");
const posted = (body, signal) => ({ method: "POST", signal, headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

export const get = async (path, given, signal) => (await call(path + query(given), { signal })).json();
export const post = async (path, body, signal) => (await call(path, posted(body, signal))).json();
export const blob = async (path, given) => (await call(path + query(given))).blob();
export const send = async (path, file, given) => (await call(path + query(given), { method: "POST", headers: { "content-type": "application/octet-stream" }, body: file })).json();

/** Follow server-sent events: hear(name, data) for each, until the event "end" or until `signal` aborts. */
export async function follow(path, body, hear, signal) {
  const answer = await call(path, posted(body, signal));
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  for (let text = "", ended = false; ;) {
    let value, done;
    try { ({ value, done } = await reader.read()); } catch (error) {
      if (error.name === "AbortError") throw error;
      done = true;
    }
    if (done && ended) return;
    if (done) {
      get("/api/status").catch(() => {}); // whether the server is there: if not, the banner says so
      throw new Refusal("The server stopped, and the inpainting with it.", 0);
    }
    text += decoder.decode(value, { stream: true });
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [name, data] = event.split("\n").map((line) => line.slice(line.indexOf(":") + 2));
      if (name === "end") ended = true;
      hear(name, JSON.parse(data));
    }
  }
}
