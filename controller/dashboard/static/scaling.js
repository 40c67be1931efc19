// How many rollout replicas were wanted, were there, and why; a number by hand.

import { follow, get } from "/static/api.js";
import { chart, colours, draw, plain } from "/static/charts.js";
import { clock, duration, el, nothing, number, percent, renew, section, table } from "/static/dom.js";

const SECONDS = 3;
const [BLUE, ORANGE, GREEN, RED] = colours;
const date = (at) => new Date(at * 1000);

export async function show(page, runs, app) {
  const run = app.chosen(runs);
  const now = el("div");
  const form = el("div");
  const boxes = [chart("Rollout replicas over time"), chart("What is lost at each decision")];
  const replicas = el("figure", {}, el("figcaption", {}, "Rollout replicas"), boxes[0]);
  const shares = el("figure", {}, el("figcaption", {}, "What is lost, at each decision"), boxes[1]);
  const rest = el("div");
  const charts = section("Over time", replicas, shares, legend());
  page.replaceChildren(app.runPicker(runs), now, form, charts, rest);
  const load = async () => {
    const [found, status] = await Promise.all([get(run, "/scaling"), run.live ? get(run, "/autoscale") : null]);
    app.lost(false);
    renew(now, [found.enabled ? wanted(found, status) : section("Now", el("p", { class: "sentence" }, found.note))]);
    if (found.enabled && status && !status.final) operating(form, status, (count) => app.scale(run, count));
    else form.replaceChildren();
    renew(rest, found.enabled ? [decisions(found)] : []);
    const lines = traces(found);
    charts.hidden = !found.enabled && lines.length === 0;
    charts.lastChild.hidden = !found.enabled;
    if (lines.length) draw(boxes[0], lines, look(found, { height: 260, yaxis: count(found) }));
    else boxes[0].replaceChildren(nothing("No rollout replica has come yet."));
    shares.hidden = found.wait.length === 0;
    if (!shares.hidden) draw(boxes[1], lost(found), look(found, { height: 170, yaxis: { range: [-0.03, 1.05], tickformat: ".0%" } }));
  };
  await load();
  if (!run.live) return () => {};
  let due = false;
  const close = follow(run, (await get(run, "/overview")).event, (event) => { due ||= event.kind !== "step"; }, app);
  const timer = setInterval(() => { if (due) { due = false; load().catch(app.failed); } }, SECONDS * 1000);
  const slow = setInterval(() => { due = true; }, 5000 * SECONDS);
  return () => { close(); clearInterval(timer); clearInterval(slow); };
}

const legend = () => el("div", {}, el("p", { class: "legend" },
  "Wanted: what the controller asks for. There: registered, neither lost nor gone. Needed: with so many, by what was measured, neither side would wait; a triangle is further up. ",
  "Held back: of the groups that replicas could hold those that the staleness bound refuses."));

function wanted(found, status) {
  const last = found.decisions.at(-1);
  const there = status?.replicas ?? found.replicas.at(-1)?.[1] ?? 0;
  const want = status?.desired ?? last?.desired ?? found.desired.at(-1)?.[1] ?? 0;
  const measured = status?.measures ?? found.measures;
  const facts = [
    ["wanted", want], ["there", there], ["of these, lease", status?.working], ["limits", `${found.minimum} to ${found.maximum}`],
    ["set", (status ? status.manual : last?.kind === "manual") ? "by hand" : "by need"],
    ["needed", measured ? number(measured.need, 2) : "–"], ["trainer waits", percent(measured?.wait)], ["held back by the bound", percent(measured?.throttled)],
    ["since", status ? clock(status.since) : "–"], ["a start takes", duration(status?.start_s)],
  ].filter(([, value]) => value !== undefined && value !== "–");
  return section(status ? "Now" : "The last decision",
    el("p", { class: "sentence", id: "wanted" }, 
      status?.final || last?.kind === "over" ? "No rollout replica is wanted any more" : `${there} of ${want} rollout replicas`),
    el("p", {}, status?.reason ?? last?.reason ?? "Nothing was decided."),
    el("dl", { class: "facts" }, facts.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, String(value))))));
}

// What somebody types stays while the page is renewed.
function operating(box, status, scale) {
  if (!box.firstChild) {
    const field = el("input", { id: "count", type: "number", required: true, step: 1, value: status.desired });
    const send = (event) => { event.preventDefault(); scale(field.valueAsNumber); };
    box.append(el("form", { class: "chooser", "aria-label": "A number by hand", onsubmit: send }, el("label", { for: "count" }, "Rollout replicas by hand"), field,
      el("button", {}, "set"), el("button", { type: "button", id: "automatic", onclick: () => scale(null) }, "automatic again"), el("span", { class: "nothing" })));
  }
  const [field, hint] = [box.querySelector("input"), box.querySelector("span")];
  [field.min, field.max] = [status.minimum, status.maximum];
  box.querySelector("#automatic").hidden = !status.manual;
  hint.textContent = status.manual ? "The number is set by hand until it is automatic again." : `From ${status.minimum} to ${status.maximum}; it stays until you give it back.`;
}

function decisions(found) {
  const rows = found.decisions.slice().reverse().map((one) => [el("span", { class: "moment" }, clock(one.at)), one.before === one.desired ? `${one.desired}` : el("strong", {}, `${one.before} → ${one.desired}`), one.reason]);
  const more = found.made > rows.length ? nothing(`The newest ${rows.length} of ${found.made}.`) : null;
  return section("Decisions", more, rows.length ? table(["time", "replicas", "why"], rows) : nothing("Nothing was decided yet."));
}

const until = (found) => found.now ?? found.ended;

// A number holds until the next one, the last one until now.
function steps(moments, found, name, more) {
  const all = moments.length ? [...moments, [until(found), moments.at(-1)[1]]] : [];
  return { type: "scatter", mode: "lines", name, x: all.map(([at]) => date(at)), y: all.map(([, value]) => value), hovertemplate: `%{y} ${name}<br>%{x}<extra></extra>`, ...more,
    line: { shape: "hv", width: 2, ...more.line } };
}

// What is more than `most` is drawn there, as a triangle.
const points = (moments, name, colour, format, most = Infinity) => ({ type: "scatter", mode: "lines+markers", name, x: moments.map(([at]) => date(at)),
  y: moments.map(([, value]) => Math.min(value, most)), customdata: moments.map(([, value]) => value), hovertemplate: `%{customdata:${format}} ${plain(name)}<br>%{x}<extra></extra>`,
  line: { width: 1, dash: "dot", color: colour }, marker: { size: moments.map(([, value]) => value > most ? 9 : 5), symbol: moments.map(([, value]) => value > most ? "triangle-up" : "circle"), color: colour, opacity: 1 } });

const traces = (found) => [
  steps(found.replicas, found, "there", { line: { color: GREEN }, fill: "tozeroy", fillcolor: `${GREEN}30` }),
  steps(found.desired, found, "wanted", { line: { color: BLUE, width: 2.5 } }),
  points(found.need, "needed", ORANGE, ".2f", 0.96 * count(found).range[1]),
].filter((trace) => trace.x.length);

const lost = (found) => [points(found.wait, "the trainer waits", RED, ".0%"), points(found.throttled, "held back by the bound", colours[4], ".0%")];

// A need beyond twice of what there ever was would press the rest down.
function count(found) {
  const most = Math.max(1, ...found.desired.map(([, n]) => n), ...found.replicas.map(([, n]) => n));
  const need = Math.max(0, ...found.need.map(([, n]) => n));
  return { range: [0, Math.min(Math.max(most, need), 2 * most) * 1.1], ...(most < 8 ? { dtick: 1 } : {}) };
}

const look = (found, more) => ({ xaxis: { type: "date", range: [date(found.began), date(until(found))] }, showlegend: true,
  legend: { orientation: "h", y: 1, yanchor: "bottom" }, margin: { l: 48, r: 12, t: 24, b: 30 }, ...more });
