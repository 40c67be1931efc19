// The front page: what the job does, how training goes, what it costs.

import { follow, get } from "/static/api.js";
import { chart, draw, line } from "/static/charts.js";
import { duration, el, nothing, number, percent, renew, section, table } from "/static/dom.js";

const CHARTS = [
  ["Reward and held-out score", ["reward_mean", "validation"]],
  ["Held-out score by source", ["validation/source/"]],
  ["Samples per second", ["samples_per_s"]],
  ["Response length in tokens", ["response_tokens_mean"]],
  ["Entropy", ["entropy"]],
  ["Loss", ["loss", "validation_loss"]],
  ["Norm of the gradient", ["grad_norm"]],
  ["Idle share of the trainer", ["idle_fraction"]],
  ["Staleness in steps", ["staleness_mean", "staleness_max"]],
];
const POINTS = 1000;
const SECONDS = 2;
const ORDER = ["durable", "trained", "batched", "ready", "leased", "waiting", "dropped"];

export async function show(page, runs, app) {
  const boxes = new Map();
  const overviews = runs.map(() => el("div"));
  const notes = el("p", { class: "nothing" });
  const curves = section("Training", notes, el("div", { class: "charts" }, CHARTS.map(([title]) => {
    const box = chart(title);
    const figure = el("figure", { hidden: true }, el("figcaption", {}, title), box);
    boxes.set(title, { box, figure });
    return figure;
  })));
  page.replaceChildren(...(runs.length > 1 ? [curves, ...overviews] : [...overviews, curves]));
  const data = await Promise.all(runs.map((run) => load(run).catch((error) => {
    if (runs.length < 2 || error.status === 401) throw error;
    return { error };
  })));
  const closers = [];
  const redraw = () => drawCurves(boxes, runs, data, notes);
  runs.forEach((run, i) => {
    const { error } = data[i];
    if (error) overviews[i].replaceChildren(section(run.name, el("pre", { class: "error" }, error.message)));
    else overview(overviews[i], data[i].overview, runs.length > 1 && run.name);
  });
  redraw();
  runs.forEach((run, i) => {
    if (run.live && !data[i].error) closers.push(live(run, data[i], app, () => overview(overviews[i], data[i].overview, runs.length > 1 && run.name), redraw));
  });
  return () => closers.forEach((close) => close());
}

async function load(run) {
  const query = [...new Set(CHARTS.flatMap(([, names]) => names))].map((name) => `metric=${name}`).join("&");
  const found = await get(run, "/overview");
  return { overview: found, curves: await get(run, `/curves?points=${POINTS}&${query}`) };
}

// Steps are added as they come; the status is asked for every two seconds at most, and only after an event.
function live(run, data, app, showOverview, redraw) {
  let due = false;
  let timer = null;
  let reload = false;
  const refresh = async () => {
    timer = null;
    due = false;
    try {
      if (reload || Object.values(data.curves.curves).some((curve) => curve.steps.length > 3 * POINTS)) {
        reload = false;
        Object.assign(data, await load(run));
      } else data.overview = await get(run, "/overview");
      showOverview();
      redraw();
      app.lost(false);
    } catch (error) {
      app.failed(error);
    }
  };
  const heard = (event) => {
    if (event.kind === "step") addStep(data.curves, event.data);
    if (event.kind === "validation") addValidation(data.curves.curves, event.data);
    if (event.kind === "rewind") reload = true;
    due = true;
  };
  const tick = setInterval(() => { if (due && timer === null) timer = setTimeout(refresh, 0); }, 1000 * SECONDS);
  const slow = setInterval(() => { due = true; }, 10000);
  const close = follow(run, data.overview.event, heard, app);
  return () => { close(); clearInterval(tick); clearInterval(slow); };
}

function addStep(curves, data) {
  const before = curves.at;
  curves.at = data.at;
  for (const name of new Set(CHARTS.flatMap(([, names]) => names))) {
    if (name in data.metrics) add(curves.curves, name, data.step, data.metrics[name]);
  }
  if (before && data.at > before) add(curves.curves, "samples_per_s", data.step, data.samples / (data.at - before));
}

function addValidation(curves, data) {
  if (data.loss != null && data.scores == null) return add(curves, "validation_loss", data.version, data.loss);
  add(curves, "validation", data.version, data.score_mean);
  const sources = Object.entries(data.sources ?? {});
  if (sources.length > 1) for (const [source, of] of sources) add(curves, `validation/source/${source}/mean@${of.n}`, data.version, of.mean?.value);
}

// The curves of a name, or of all names that begin with it.
function curvesOf(curves, name) {
  return name.endsWith("/") ? Object.keys(curves).filter((known) => known.startsWith(name)) : [name];
}

function add(curves, name, step, value) {
  const curve = (curves[name] ??= { steps: [], values: [] });
  while (curve.steps.length && curve.steps.at(-1) >= step) { curve.steps.pop(); curve.values.pop(); }
  curve.steps.push(step);
  curve.values.push(value ?? null);
}

function drawCurves(boxes, runs, data, notes) {
  let any = false;
  for (const [title, names] of CHARTS) {
    const traces = [];
    runs.forEach((run, i) => names.flatMap((name) => curvesOf(data[i].curves?.curves ?? {}, name)).forEach((name) => {
      const curve = data[i].curves?.curves[name];
      if (!curve || !curve.values.some((value) => value !== null)) return;
      const label = runs.length > 1 ? (names[0] !== name || names.length > 1 ? `${run.name} ${name}` : run.name) : name;
      traces.push(line(curve, label, name.startsWith("validation") ? { mode: "lines+markers" } : {}));
    }));
    const { box, figure } = boxes.get(title);
    figure.hidden = traces.length === 0;
    any ||= traces.length > 0;
    if (traces.length) draw(box, traces.map((trace) => ({ ...trace })), {
      showlegend: traces.length > 1, xaxis: { title: { text: "step" } }, height: 220 + 10 * traces.length,
      margin: { l: 48, r: 12, t: 10 + 10 * traces.length, b: 36 }, legend: { orientation: "h", y: 1, yanchor: "bottom" } });
  }
  notes.textContent = any ? "" : data.some((one) => one.overview?.job.step > 0) ? "No step has any of the metrics that are drawn." : "No step is trained yet: curves come with the first one.";
}

function overview(box, found, name) {
  const { job, ledger, replicas } = found;
  const facts = [
    [job.unknown ? "last phase" : "phase", job.phase], ["step", job.total_steps ? `${job.step} of ${job.total_steps}` : job.step],
    ["reward", number(job.reward)], ["held-out score", number(job.validation?.score_mean)],
    ["held-out loss", number(job.validation?.loss)],
    ["samples/s", number(job.samples_per_s)], ["tokens/s", number(job.tokens_per_s)],
    ["idle trainer", percent(job.idle?.policy)], ["idle generators", percent(job.idle?.rollout)],
    ["waiting for rewards", percent(job.rewards?.wait_fraction)], ["left", duration(job.eta_s)],
    ["newest version", job.version >= 0 ? job.version : undefined], ["largest staleness", number(job.max_staleness)],
  ].filter(([, value]) => value !== undefined && value !== "–");
  const alarms = (job.alarms ?? []).map((alarm) => el("li", {}, `${alarm.name}: ${alarm.text}`));
  renew(box, [
    section(name || "Now",
      el("p", { class: "sentence", id: name ? null : "sentence" }, job.sentence || job.note || `the job is ${job.phase}`),
      alarms.length ? el("ul", { class: "alarms", "aria-label": "Alarms" }, alarms) : null,
      job.last_error ? el("pre", { class: "error" }, job.last_error) : null,
      el("dl", { class: "facts" }, facts.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, String(value))))),
      (job.advice ?? []).map((text) => el("p", { class: "advice" }, text))),
    job.unknown ? nothing(`Not known of a killed run: ${job.unknown}.`) : null,
    ledger?.created ? section("Groups", bar(ledger)) : null,
    ledger && Object.keys(ledger.staleness ?? {}).length ? section("Staleness of trained samples", histogram(ledger)) : null,
    faults(job, ledger),
    job.validation?.scores ? section(`Validation of version ${job.validation.version}`, estimates(job.validation)) : null,
    job.members ? section("Trainers", trainers(job.members)) : null,
    section(job.unknown ? "Replicas, as last heard of" : "Replicas", replicaTable(replicas)),
  ]);
}

// A row for each data source: mean@n, maj@n and pass@k with their 95 % intervals.
function estimates({ scores, sources }) {
  const cell = (one) => (one ? number(one.value) + (one.low == null ? "" : ` [${number(one.low)}, ${number(one.high)}]`) : "–");
  const ks = Object.keys(scores.passed);
  const row = ([name, of]) => [name, of.prompts, cell(of.mean), cell(of.majority), ...ks.map((k) => cell(of.passed[k])), of.errors];
  return table(["source", "prompts", `mean@${scores.n}`, `maj@${scores.n}`, ...ks.map((k) => `pass@${k}`), "errors"],
    [...Object.entries(sources), ["all", scores]].map(row));
}

function bar(ledger) {
  const states = Object.entries(ledger.states).filter(([, n]) => n > 0).sort((a, b) => ORDER.indexOf(a[0]) - ORDER.indexOf(b[0]));
  const total = states.reduce((sum, [, n]) => sum + n, 0);
  const label = states.map(([state, n]) => `${state} ${n}`).join(" + ") + ` = ${total}`;
  return el("div", {},
    el("div", { class: "bar", role: "img", "aria-label": label }, states.map(([state, n]) =>
      el("span", { class: `state-${state}`, title: `${state} ${n}`, style: { "flex-grow": String(n) } }))),
    el("p", { class: "legend" }, states.map(([state, n]) => el("span", { class: `key state-${state}` }, `${state} ${n}`)),
      el("span", {}, total === ledger.created ? `= ${ledger.created} created` : `≠ ${ledger.created} created`)),
    el("p", { class: "legend" }, "A group (all answers to one question) is waiting, leased (being written), ready, batched (taken by a step), trained, and durable (in a checkpoint)."));
}

function histogram(ledger) {
  const ages = Object.entries(ledger.staleness).map(([age, n]) => [Number(age), n]);
  const most = Math.max(...ages.map(([, n]) => n));
  const last = Math.min(Math.max(ledger.bound, ...ages.map(([age]) => age)), 32);
  const rows = [];
  for (let age = 0; age <= last; age += 1) {
    const n = ages.filter(([a]) => a === age || (age === last && a > last)).reduce((sum, [, k]) => sum + k, 0);
    rows.push(el("div", { class: age > ledger.bound ? "column over" : "column", title: `${n} samples, ${age} steps old` },
      el("span", { class: "n" }, String(n)), el("span", { class: "fill", style: { height: `${(100 * n) / most}px` } }),
      el("span", {}, age === ledger.bound ? `${age} ┃` : String(age))));
  }
  return el("div", {}, el("div", { class: "histogram" }, rows),
    el("p", { class: "legend" }, `in steps; the bound is ${ledger.bound}, the oldest sample ever trained ${ledger.max_staleness}`));
}

function faults(job, ledger) {
  const rows = [
    ...Object.entries(job.faults ?? {}),
    ...Object.entries(job.rewards?.failed ?? {}).map(([kind, n]) => [`reward: ${kind}`, String(n)]),
    ...(job.rewards?.retried ? [["rewards that were scored again", String(job.rewards.retried)]] : []),
    ...Object.entries(ledger?.dropped ?? {}).map(([reason, n]) => [`groups dropped: ${reason}`, String(n)]),
  ];
  return rows.length ? section("Errors", table(["kind", "count"], rows), el("p", {}, el("a", { href: "#/samples/errors" }, "samples that failed"))) : null;
}

function trainers(found) {
  const rows = found.members.map((one, i) => [one.replica_id, `${one.parts} of ${found.parts}`, one.seconds ? `${number(one.seconds)} s` : "–", i ? "" : "leads: commits, publishes, saves"]);
  rows.push(...found.waiting.map((name) => [name, "–", "–", "waits for the next step"]));
  return el("div", {}, rows.length ? table(["replica", "parts of each batch", "for a part", ""], rows) : nothing("No trainer is there."),
    el("p", { class: "legend" }, `epoch ${found.epoch}: counts how often members or their parts have changed`));
}

function replicaTable(replicas) {
  if (!replicas?.length) return nothing("No replica is known.");
  return table(["name", "state", "version", "doing", "idle", "samples/s", "last seen"], replicas.map((r) => [
    r.name, el("span", { class: `health-${r.state}` }, r.state), String(r.version ?? "–"), r.status || (r.leases ? `${r.leases} leases` : ""),
    percent(r.gauges?.idle_fraction), number(r.gauges?.samples_per_s), duration(r.last_seen_s),
  ]));
}
