// Steps, their groups side by side, and the tokens of a sample.

import { get } from "/static/api.js";
import { el, nothing, number, section } from "/static/dom.js";

const MOST_TOKENS = 4000;
const MODES = {
  "log-prob": (s, i) => (s.logprobs?.[i] === undefined ? null : Math.min(1, -s.logprobs[i] / 5)),
  "trainer − engine": (s, i) => {
    const gap = (s.trainer_logprobs?.[i] ?? NaN) - (s.logprobs?.[i] ?? NaN);
    return Number.isNaN(gap) ? null : Math.max(-1, Math.min(1, gap));
  },
  version: (s, i) => {
    const versions = s.versions ?? [];
    const first = versions[0]?.[1] ?? 0;
    const last = versions.at(-1)?.[1] ?? 0;
    return last === first ? 0 : (versionOf(s, i) - first) / (last - first);
  },
  plain: () => null,
};
let mode = "log-prob";

const versionOf = (s, i) => (s.versions ?? []).filter(([start]) => start <= i).at(-1)?.[1];

export async function show(page, runs, app, [kind = "train", step = "newest"]) {
  const run = app.chosen(runs);
  const listed = ["best", "worst", "errors"].includes(kind);
  const query = listed ? `order=${kind}&limit=20` : `kind=${kind}&limit=200${step === "newest" ? "" : `&step=${Number(step)}`}`;
  const [kept, found] = await Promise.all([get(run, "/samples/steps"), get(run, `/samples?${query}`)]);
  const groups = new Map();
  for (const sample of found) {
    const key = listed ? `${sample.step}/${sample.group}/${sample.index}` : `${sample.group}${sample.attempt ? `, attempt ${sample.attempt}` : ""}`;
    groups.set(key, [...(groups.get(key) ?? []), sample]);
  }
  const list = el("div", { id: "samples" }, found.length === 0 ? nothing("No such sample is kept: they come with the first trained step.") :
    [...groups].map(([name, samples]) => group(name, samples)));
  page.replaceChildren(app.runPicker(runs), chooser(kept, kind, found[0]?.step, list, () => show(page, runs, app, [kind, step])), list);
  return () => {};
}

function chooser(kept, kind, step, list, again) {
  const go = (event) => { location.hash = event.target.value; };
  const select = (label, name) => kept[name].length === 0 ? null : el("label", {}, `${label} `, el("select", { onchange: go },
    el("option", { value: `#/samples/${name}` }, "newest"),
    kept[name].slice().reverse().map((n) => el("option", { value: `#/samples/${name}/${n}`, selected: kind === name && n === step }, String(n)))));
  const colour = el("label", {}, "colour by ", el("select", { id: "colour", onchange: (event) => { mode = event.target.value; again(); } },
    Object.keys(MODES).map((name) => el("option", { selected: name === mode }, name))));
  return el("p", { class: "chooser" }, select("step", "train"), select("validation", "validation"),
    ["best", "worst", "errors"].map((order) => el("a", { href: `#/samples/${order}`, "aria-current": kind === order ? "page" : null }, order)), colour,
    el("span", { class: "nothing" }, "j and k go from sample to sample"));
}

function group(name, samples) {
  const first = samples[0];
  const where = first.kind === "validation" ? `validation of version ${first.step}` : `step ${first.step}`;
  return section(`${where}, group ${name}`,
    el("pre", { class: "prompt" }, first.prompt),
    first.reference ? el("p", {}, "reference: ", el("code", {}, first.reference)) : null,
    el("div", { class: "side-by-side" }, samples.map(card)));
}

function card(sample) {
  const rewards = Object.entries(sample.rewards ?? {}).map(([name, value]) =>
    `${name} ${number(value)}${sample.weights && name in sample.weights ? ` × ${sample.weights[name]}` : ""}`);
  const facts = [
    sample.score === null || sample.score === undefined ? "no score" : `score ${number(sample.score)}`, rewards.join(", "),
    typeof sample.advantage === "number" ? `advantage ${number(sample.advantage)}` : "", `${sample.response_tokens} tokens`,
    sample.ending, sample.oldest_version === sample.newest_version ? `version ${sample.newest_version}` : `versions ${sample.oldest_version} to ${sample.newest_version}`,
    sample.dropped ? `dropped: ${sample.dropped}` : "",
  ].filter(Boolean).join(" · ");
  return el("article", { class: "sample", tabindex: 0, "aria-label": `sample ${sample.index} of group ${sample.group}` },
    el("p", { class: "legend" }, `${sample.index}: ${facts}`), tokens(sample),
    sample.error ? el("pre", { class: "error" }, sample.error) : null);
}

function tokens(sample) {
  const pieces = sample.pieces ?? [];
  if (pieces.length === 0) return el("pre", { class: "answer" }, sample.answer);
  const box = el("pre", { class: "answer" });
  pieces.slice(0, MOST_TOKENS).forEach((piece, i) => {
    const share = MODES[mode](sample, i);
    const token = el("span", { title: about(sample, i) }, piece);
    if (share !== null) token.style.backgroundColor = share < 0 ? `rgb(59 130 196 / ${-0.7 * share})` : `rgb(224 123 57 / ${0.7 * share})`;
    box.append(token);
  });
  if (pieces.length > MOST_TOKENS) box.append(`… ${pieces.length - MOST_TOKENS} more tokens`);
  return box;
}

// Every generated token is learned from in these records; what is not generated is in the prompt.
function about(sample, i) {
  const mine = sample.logprobs?.[i];
  const trainer = sample.trainer_logprobs?.[i];
  return [`token ${i}`, `engine ${number(mine)}`, trainer === undefined ? "" : `trainer ${number(trainer)}, difference ${number(trainer - mine)}`,
    `version ${versionOf(sample, i) ?? "unknown"}`, typeof sample.advantage === "number" ? `advantage ${number(sample.advantage)}` : ""].filter(Boolean).join(", ");
}

export function move(by) {
  const all = [...document.querySelectorAll("article.sample")];
  const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(document.activeElement) + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}
