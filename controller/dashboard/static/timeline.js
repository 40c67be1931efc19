// A lane for each replica, steps and published versions as marks, and what happened to the job.

import { get } from "/static/api.js";
import { chart, draw } from "/static/charts.js";
import { clock, el, nothing, section, table } from "/static/dom.js";

const STATES = { live: "#4a9c5d", draining: "#d9a441", lost: "#c2514f", left: "#8c8f94" };
const date = (at) => new Date(at * 1000);

export async function show(page, runs, app) {
  const run = app.chosen(runs);
  const found = await get(run, "/timeline");
  const box = chart("Replicas over time");
  const marks = found.marks.slice().reverse();
  page.replaceChildren(app.runPicker(runs),
    section("Timeline", found.began === null ? nothing("Nothing has happened yet.") : box),
    section("Failures", found.faults.length ? table(["kind", "count", "last", "text"], found.faults.map((f) => [
      f.kind, String(f.count), clock(f.at), el("details", {}, el("summary", {}, f.text.split("\n")[0]), el("pre", {}, f.text))])) : nothing("Nothing has failed.")),
    section("Events", marks.length ? table(["time", "kind", "what"], marks.map((mark) => [clock(mark.at), mark.kind, mark.text])) : nothing("There are none.")));
  if (found.began !== null) draw(box, traces(found), look(found));
  return () => {};
}

function traces(found) {
  const bars = {};
  const starts = { x: [], y: [], text: [] };
  for (const lane of found.lanes) {
    lane.spans.forEach((span, i) => {
      const until = lane.spans[i + 1]?.at ?? found.ended;
      const list = (bars[span.state] ??= { x: [], y: [], base: [], text: [] });
      if (span.state === "live" || span.state === "draining") {
        list.y.push(lane.name); list.base.push(date(span.at)); list.x.push(Math.max(1, (until - span.at) * 1000)); list.text.push(span.text);
      }
      if (i > 0 && (span.state === "lost" || span.replica_id !== lane.spans[i - 1].replica_id)) {
        starts.x.push(date(span.at)); starts.y.push(lane.name); starts.text.push(span.text);
      }
    });
  }
  const all = Object.entries(bars).filter(([, b]) => b.y.length).map(([state, b]) => ({
    type: "bar", orientation: "h", name: state, ...b, hovertext: b.text, text: undefined, hoverinfo: "text", marker: { color: STATES[state] }, width: 0.5 }));
  const moments = (name, list, symbol, what) => ({ type: "scatter", mode: "markers", name, x: list.map(([at]) => date(at)), y: list.map(() => name),
    hovertext: list.map(([, n]) => `${what} ${n}`), hoverinfo: "text+x", marker: { symbol, size: 8 } });
  all.push({ type: "scatter", mode: "markers", name: "lost, restarted", ...starts, hoverinfo: "text", marker: { symbol: "x", size: 9, color: "#c2514f" } });
  all.push(moments("steps", found.steps, "line-ns-open", "step"), moments("publications", found.publications, "line-ns-open", "version"));
  const events = found.marks.map((mark) => [mark.at, mark.text]);
  all.push(moments("events", events, "diamond", ""));
  return all.filter((trace) => trace.x.length);
}

function look(found) {
  const lines = found.publications.length > 200 ? [] : found.publications.map(([at]) => ({
    type: "line", xref: "x", yref: "paper", x0: date(at), x1: date(at), y0: 0, y1: 1, line: { width: 1, dash: "dot", color: "#8a6bbf66" } }));
  return { height: 160 + 34 * found.lanes.length, barmode: "overlay", shapes: lines, xaxis: { type: "date" }, yaxis: { type: "category" }, showlegend: true };
}
