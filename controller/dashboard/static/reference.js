// The calls of the controller, out of its own OpenAPI document.

import { get } from "/static/api.js";
import { el, nothing, section, table } from "/static/dom.js";

export async function show(page, runs) {
  const run = runs.find((known) => known.live);
  if (!run) {
    page.replaceChildren(nothing("Calls are answered by the controller of a job that runs. These runs are read from their directories."));
    return () => {};
  }
  const document = await get(run, "/openapi.json");
  const calls = Object.entries(document.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, call]) => ({ path, method: method.toUpperCase(), ...call })));
  const rows = el("div");
  const filter = el("input", { type: "search", "aria-label": "Find a call", placeholder: "find a call", oninput: () => list() });
  const list = () => {
    const groups = new Map();
    for (const call of calls.filter(({ path, method }) => `${method} ${path}`.toLowerCase().includes(filter.value.toLowerCase()))) {
      const tag = call.tags?.[0] ?? "other";
      groups.set(tag, [...(groups.get(tag) ?? []), call]);
    }
    rows.replaceChildren(...[...groups].map(([tag, found]) => section(tag, found.map((call) => describe(call, document)))));
  };
  list();
  page.replaceChildren(section("Calls", el("p", {}, "Each call needs a token: ", el("code", {}, "TOKEN=$(cat RUN_DIR/.tokens/user)"),
    ". Programs find all of this at ", el("code", {}, "GET /v1/openapi.json"), "."), filter), rows);
  return () => {};
}

function describe(call, document) {
  const parameters = (call.parameters ?? []).map((p) => [el("code", {}, p.name), p.in + (p.required ? ", required" : ""), typeOf(p.schema), p.description ?? p.schema?.description ?? ""]);
  const [kind, body] = Object.entries(call.requestBody?.content ?? {})[0] ?? [];
  const [answered, answer] = Object.entries(call.responses?.[200]?.content ?? {})[0] ?? [];
  return el("details", {}, el("summary", {}, el("code", {}, `${call.method} ${call.path}`), " ", (call.description ?? "").split("\n")[0]),
    el("pre", { class: "prompt" }, curl(call, kind)),
    parameters.length ? table(["parameter", "in", "type", "meaning"], parameters) : null,
    kind ? [el("p", {}, `body: ${kind}`), fields(body.schema, document)] : null,
    answered ? [el("p", {}, `answer: ${answered}`), fields(answer.schema, document)] : null);
}

function curl(call, kind) {
  const query = (call.parameters ?? []).filter((p) => p.in === "query" && p.required).map((p) => `${p.name}=${p.name.toUpperCase()}`).join("&");
  const body = kind === "application/json" ? " -H 'Content-Type: application/json' -d @BODY.json" : kind ? ` -H 'Content-Type: ${kind}' --data-binary @BODY` : "";
  const path = call.path.replace(/\{(\w+)\}/g, (_, name) => name.toUpperCase());
  return `curl${call.method === "GET" ? "" : ` -X ${call.method}`} -H "Authorization: Bearer $TOKEN"${body} '${location.origin}${path}${query && "?"}${query}'`;
}

const named = (schema, document) => (schema?.$ref ? document.components.schemas[schema.$ref.split("/").at(-1)] : schema);

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  return schema.type === "array" ? `list of ${typeOf(schema.items)}` : schema.type ?? "";
}

function fields(schema, document) {
  const found = named(schema?.type === "array" ? schema.items : schema, document);
  const rows = Object.entries(found?.properties ?? {}).map(([name, field]) =>
    [el("code", {}, name), typeOf(field) + (found.required?.includes(name) ? "" : ", optional"), field.description ?? ""]);
  return rows.length ? table(["field", "type", "meaning"], rows) : nothing(typeOf(schema) || schema?.description || "");
}
