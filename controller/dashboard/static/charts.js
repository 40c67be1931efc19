// Charts by plotly.js, which is loaded with the first of them.

import { el, nothing } from "/static/dom.js";

let loading = null;

function library() {
  loading ??= new Promise((resolve, reject) => {
    const script = el("script", { src: "/static/plotly.min.js" });
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("no charts: the Python package plotly is not installed with the controller"));
    document.head.append(script);
  });
  return loading;
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const drawn = new Map();
dark.addEventListener("change", () => drawn.forEach(([traces, more], box) => box.isConnected && draw(box, traces, more)));

export const colours = ["#3b82c4", "#e07b39", "#4a9c5d", "#c2514f", "#8a6bbf", "#8c6d46", "#d174b0", "#7a7a7a"];

function layout(more) {
  const ink = dark.matches ? "#d6d9de" : "#22262b";
  const grid = dark.matches ? "#3a3f46" : "#e2e5e9";
  const axis = { gridcolor: grid, zerolinecolor: grid, automargin: true, fixedrange: false };
  return {
    height: 240, margin: { l: 48, r: 12, t: 10, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 11, family: "system-ui, sans-serif" }, colorway: colours, hovermode: "closest", uirevision: "a zoom outlives new points",
    legend: { orientation: "h", y: 1.15 }, ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

export async function draw(box, traces, more = {}) {
  try {
    const plotly = await library();
    if (!box.isConnected) return;
    for (const known of drawn.keys()) if (!known.isConnected) { plotly.purge(known); drawn.delete(known); }
    drawn.set(box, [traces, more]);
    await plotly.react(box, traces, layout(more), { displayModeBar: false, responsive: true });
  } catch (error) {
    box.replaceChildren(nothing(error.message));
  }
}

// Plotly takes markup of its own in texts; names of others are none.
export const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// A curve of /curves as a trace; few points are seen as points.
export const line = (curve, name, more = {}) => ({
  type: "scatter", x: curve.steps, y: curve.values, name: plain(name), connectgaps: false,
  mode: curve.steps.length < 60 ? "lines+markers" : "lines", line: { width: 1.5 }, marker: { size: 4 }, ...more,
});

export const chart = (label) => el("div", { class: "chart", role: "img", "aria-label": label });
