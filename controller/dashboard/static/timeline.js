// A lane for each replica and each rank of a trainer, versions as lines, and what happened to the job.

import { follow, get } from "/static/api.js";
import { chart, draw, plain } from "/static/charts.js";
import { clock, el, nothing, renew, section, table } from "/static/dom.js";

const STATES = { live: "#4a9c5d", draining: "#d9a441" };
const MOST_RANKS = 64;
const MOST_LINES = 60;
const SECONDS = 5;
const date = (at) => new Date(at * 1000);

export async function show(page, runs, app) {
  const run = app.chosen(runs);
  const box = chart("Replicas over time");
  const head = section("Timeline", box, el("p", { class: "legend" },
    "A bar: the replica is up; all ranks of a trainer start and end together. Dotted lines: a version of the weights is published. ",
    "Cross: lost (killed, or silent). Triangle: started again."));
  const rest = el("div");
  page.replaceChildren(app.runPicker(runs), head, rest);
  const load = async () => {
    const found = await get(run, "/timeline");
    app.lost(false);
    const marks = found.marks.slice().reverse();
    renew(rest, [
      section("Failures", found.faults.length ? table(["kind", "count", "last", "text"], found.faults.map((f) => [
        f.kind, String(f.count), clock(f.at), el("details", { "data-key": f.kind }, el("summary", {}, f.text.split("\n")[0]), el("pre", {}, f.text))])) : nothing("Nothing has failed.")),
      section("Events", marks.length ? table(["time", "kind", "what"], marks.map((mark) => [clock(mark.at), mark.kind, mark.text])) : nothing("There are none."))]);
    if (found.began === null) box.replaceChildren(nothing("Nothing has happened yet."));
    else draw(box, traces(found), look(found));
  };
  await load();
  if (!run.live) return () => {};
  let due = false;
  const close = follow(run, (await get(run, "/overview")).event, () => { due = true; }, app);
  const timer = setInterval(() => { if (due) { due = false; load().catch(app.failed); } }, SECONDS * 1000);
  const slow = setInterval(() => { due = true; }, 6000 * SECONDS);
  return () => { close(); clearInterval(timer); clearInterval(slow); };
}

function lanes({ name, role, ranks }) {
  if (ranks < 2) return [plain(role === "policy" ? `${name} rank 0` : name)];
  return Array.from({ length: Math.min(ranks, MOST_RANKS) }, (_, rank) => plain(`${name} rank ${rank}`));
}

function traces(found) {
  const bars = {};
  const points = () => ({ x: [], y: [], hovertext: [] });
  const lost = points();
  const again = points();
  for (const lane of found.lanes) for (const name of lanes(lane)) {
    const mark = (list, span) => { list.x.push(date(span.at)); list.y.push(name); list.hovertext.push(plain(span.text)); };
    lane.spans.forEach((span, i) => {
      if (span.state in STATES) {
        const bar = (bars[span.state] ??= { ...points(), base: [] });
        const until = lane.spans[i + 1]?.at ?? found.now ?? found.ended;
        mark(bar, span);
        bar.base.push(date(span.at));
        bar.x[bar.x.length - 1] = Math.max(1, (until - span.at) * 1000);
      }
      if (span.state === "lost") mark(lost, span);
      if (span.state === "live" && i > 0 && span.replica_id !== lane.spans[i - 1].replica_id) mark(again, span);
    });
  }
  const moments = (name, list, symbol, what) => ({ name, x: list.map(([at]) => date(at)), y: list.map(() => name), hovertext: list.map(([, n]) => plain(`${what} ${n}`)), marker: { symbol, size: 8 } });
  const dots = [moments("steps", found.steps, "line-ns-open", "step"), moments("publications", found.publications, "line-ns-open", "version"),
    moments("events", found.marks.map((mark) => [mark.at, mark.text]), "diamond", ""),
    { name: "lost", ...lost, marker: { symbol: "x", size: 10, color: "#c2514f" } },
    { name: "started again", ...again, marker: { symbol: "triangle-right", size: 11, color: "#e07b39" } }];
  return [...Object.entries(bars).map(([name, bar]) => ({ type: "bar", orientation: "h", name, ...bar, hoverinfo: "text", marker: { color: STATES[name] }, width: 0.5 })),
    ...dots.map((trace) => ({ type: "scatter", mode: "markers", hoverinfo: "text+x", ...trace }))].filter((trace) => trace.x.length);
}

function look(found) {
  const every = Math.ceil(found.publications.length / MOST_LINES) || 1;
  const shapes = found.publications.filter((_, i) => i % every === 0).map(([at]) => ({
    type: "line", xref: "x", yref: "paper", x0: date(at), x1: date(at), y0: 0, y1: 1, line: { width: 1, dash: "dot", color: "#8a6bbf80" } }));
  const n = found.lanes.flatMap(lanes).length;
  return { height: 200 + 30 * n, barmode: "overlay", shapes, margin: { l: 10, r: 12, t: 10, b: 36 }, xaxis: { type: "date" }, yaxis: { type: "category" }, showlegend: innerWidth > 700 };
}
