// The OpenAPI description of the server, as a page.
import { get } from "./api.js";
import { $, el } from "./draw.js";

const kind = (schema) => {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(kind).join(" | ");
  if (schema.type === "array") return `[${kind(schema.items)}]`;
  const range = [schema.minimum !== undefined && `≥ ${schema.minimum}`, schema.maximum !== undefined && `≤ ${schema.maximum}`].filter(Boolean);
  return [schema.format ?? schema.type ?? "anything", ...range].join(", ");
};

const line = (name, schema, needed) => el("tr", {}, el("td", {}, el("code", {}, name)), el("td", {}, kind(schema)),
  el("td", {}, needed ? "required" : schema.default !== undefined ? `default ${JSON.stringify(schema.default)}` : ""), el("td", {}, schema.description ?? ""));

function fields(found, schema) {
  if (!schema?.$ref) return [];
  const model = found.components.schemas[schema.$ref.split("/").pop()];
  return Object.entries(model.properties ?? {}).map(([name, each]) => line(name, each, model.required?.includes(name)));
}

function endpoint(found, path, method, what) {
  const asked = (what.parameters ?? []).map((each) => line(each.name, { ...each.schema, description: each.description ?? each.schema.description }, each.required));
  const [type, body] = Object.entries(what.requestBody?.content ?? {})[0] ?? [];
  const part = (title, rows) => {
    if (!rows.length) return title.startsWith("Body") ? [el("h2", {}, title)] : [];
    const box = el("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: `${title} of ${path}` }, el("table", {}, el("tbody", {}, ...rows)));
    return [el("h2", {}, title), box];
  };
  return el("section", { className: "pane wide" }, el("h2", {}, el("code", {}, `${method.toUpperCase()} ${path}`)), el("p", {}, what.description ?? ""),
    ...part("Parameters", asked), ...(type ? part(`Body: ${type}`, fields(found, body?.schema)) : []));
}

try {
  const found = await get("/openapi.json");
  $("endpoints").replaceChildren(...Object.entries(found.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, what]) => endpoint(found, path, method, what))));
} catch (error) { $("endpoints").textContent = error.message; }
