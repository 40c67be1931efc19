// The configuration with the origin of each key, differences between runs, and logs.

import { get } from "/static/api.js";
import { bytes, el, nothing, section, table } from "/static/dom.js";

function flat(value, path = "", found = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
    for (const [key, inner] of Object.entries(value)) flat(inner, path ? `${path}.${key}` : key, found);
  } else found[path] = JSON.stringify(value);
  return found;
}

export async function config(page, runs, app) {
  const run = app.chosen(runs);
  const [mine, origins] = await Promise.all([get(run, "/config"), get(run, "/config/origins")]);
  const keys = flat(mine);
  const others = await Promise.all(runs.filter((other) => other !== run).map((other) => get(other, "/config")
    .then((found) => compared(keys, other.name, flat(found)), (error) => nothing(`${other.name}: ${error.message}`))));
  const difference = el("div", {}, others);
  const file = el("input", { type: "file", accept: ".json", onchange: async (event) => {
    const [chosen] = event.target.files;
    try {
      difference.replaceChildren(compared(keys, chosen.name, flat(JSON.parse(await chosen.text()))));
    } catch {
      difference.replaceChildren(nothing(`${chosen.name} is not the config.json of a run.`));
    }
  } });
  const origin = (key) => Object.entries(origins).find(([known]) => key === known || key.startsWith(`${known}.`))?.[1] ?? "default";
  const filter = el("input", { type: "search", "aria-label": "Find a key", placeholder: "find a key", oninput: () => list() });
  const rows = el("div");
  const list = () => {
    const wanted = Object.entries(keys).filter(([key]) => key.includes(filter.value));
    rows.replaceChildren(table(["key", "value", "origin"], wanted.map(([key, value]) => [el("code", {}, key), el("code", {}, value), origin(key)])));
  };
  list();
  page.replaceChildren(app.runPicker(runs), section("Differences",
    el("p", {}, el("label", {}, "config.json of another run (it stays in the browser) ", file)), difference),
    section("Configuration", filter, rows));
  return () => {};
}

function compared(mine, name, other) {
  const keys = [...new Set([...Object.keys(mine), ...Object.keys(other)])].filter((key) => mine[key] !== other[key]).sort();
  if (keys.length === 0) return nothing(`${name}: no difference`);
  return table(["key", "this run", name], keys.map((key) => [el("code", {}, key), mine[key] ?? "unset", other[key] ?? "unset"]));
}

export async function logs(page, runs, app, [name]) {
  const run = app.chosen(runs);
  const files = await get(run, "/logs");
  const text = el("pre", { class: "log", tabindex: 0, "aria-label": "The end of the log" });
  const chosen = name ? decodeURIComponent(name) : files[0]?.name;
  const read = async () => {
    if (text.scrollHeight - text.scrollTop - text.clientHeight > 8) return; // somebody reads further up
    const found = await get(run, `/logs/${encodeURIComponent(chosen)}`);
    app.lost(false);
    text.textContent = found.text || "It is empty.";
    text.scrollTop = text.scrollHeight;
  };
  page.replaceChildren(app.runPicker(runs), section("Logs", files.length ? el("p", { class: "chooser" }, files.map((file) =>
    el("a", { href: `#/logs/${encodeURIComponent(file.name)}`, "aria-current": file.name === chosen ? "page" : null }, `${file.name} (${bytes(file.n_bytes)})`))) :
    nothing("There are no logs."), files.length ? text : null));
  if (chosen) await read();
  const timer = run.live && chosen ? setInterval(() => read().catch(app.failed), 5000) : null;
  return () => clearInterval(timer);
}
