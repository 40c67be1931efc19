// Steps, their groups side by side, and the tokens of a sample.

import { follow, get } from "/static/api.js";
import { el, nothing, number, section, table } from "/static/dom.js";

const MOST_TOKENS = 4000;
const MOST_SAMPLES = 200;
const LIMIT = 1000;
const clamp = (value) => (Number.isNaN(value) ? null : Math.max(-1, Math.min(1, value)));
const sameGroup = (a, b) => a.group === b.group && a.attempt === b.attempt;
const learned = (sample) => typeof sample.advantage === "number";
const versionOf = (s, i) => (s.versions ?? []).filter(([start]) => start <= i).at(-1)?.[1];
const span = (of, samples) => { const all = samples.flatMap(of); return [Math.min(...all), Math.max(...all)]; };
const versions = (samples) => span((s) => (s.versions ?? []).map(([, version]) => version), samples);

// By name: the colour of a token from -1 (blue) to 1 (orange) or null, and what that means.
const MODES = {
  "log-prob": [(s, i) => clamp(-(s.logprobs?.[i] ?? NaN) / 5),
    () => "How unlikely the engine found the token it chose: from no colour (log-prob 0, certain) to full at −5 (a chance of 0.7 %)."],
  "trainer − engine": [(s, i) => clamp((s.trainer_logprobs?.[i] ?? NaN) - (s.logprobs?.[i] ?? NaN)),
    () => "Log-prob by the trainer minus that by the engine. Near 0 (no colour): both compute the same. Orange: likelier for the trainer, blue: less likely; full at ±1. Old versions differ more."],
  version: [(s, i, [first, last]) => (last > first ? clamp((versionOf(s, i) - first) / (last - first)) : null),
    (_, [first, last]) => (last > first ? `Which weights wrote the token: from no colour (version ${first}) to full (version ${last}).` : "All tokens of this group were written by one version of the weights.")],
  mask: [(s) => (learned(s) ? 0.6 : null),
    () => "Coloured tokens are learned from. Prompts never are, and neither are samples that failed or whose group was dropped."],
  advantage: [(s) => (learned(s) ? clamp(s.advantage / 2) : null),
    () => "How much better than its group an answer scored. Orange becomes likelier, blue less likely, no colour stays; full at ±2."],
  plain: [() => null, () => ""],
};
let mode = "log-prob";
let wide = ""; // kind and step of which as many samples as possible are shown

export async function show(page, runs, app, [kind = "train", step = "newest", wanted]) {
  const run = app.chosen(runs);
  const most = wide === `${kind}/${step}` ? LIMIT - 1 : MOST_SAMPLES;
  const listed = ["best", "worst", "errors"].includes(kind);
  const query = listed ? `order=${kind}&limit=20` : `kind=${kind}&limit=${most + 1}${step === "newest" ? "" : `&step=${Number(step)}`}`;
  const [kept, found, since] = await Promise.all([get(run, "/samples/steps"), get(run, `/samples?${query}`), run.live ? get(run, "/overview") : null]);
  const cut = !listed && found.length > most;
  if (cut) while (found.length > 1 && sameGroup(found.at(-2), found.at(-1))) found.pop();
  if (cut) found.pop();
  const groups = new Map();
  for (const sample of found) {
    const key = listed ? `${sample.step}, ${sample.group}, ${sample.index}` : `${sample.group}${sample.attempt ? `, attempt ${sample.attempt}` : ""}`;
    groups.set(key, [...(groups.get(key) ?? []), sample]);
  }
  const newest = found[0]?.step;
  const names = [...groups.keys()];
  const name = groups.has(decodeURIComponent(wanted ?? "")) ? decodeURIComponent(wanted) : names[0];
  const address = (other) => `#/samples/${kind}/${newest}/${encodeURIComponent(other)}`;
  const list = el("div", { id: "samples" });
  const news = el("p", { role: "status" });
  const fill = () => list.replaceChildren(...(found.length === 0 ? [nothing("No such sample is kept: they come with the first trained step.")] :
    listed ? [...groups].map(([key, samples]) => group(key, samples)) : [overview(groups, name, address), group(name, groups.get(name))]));
  fill();
  page.replaceChildren(app.runPicker(runs), chooser(kept, kind, newest, fill), ...(cut ? [el("p", { class: "nothing" }, `The first ${found.length} samples; there are more. `,
    most < LIMIT - 1 ? el("button", { onclick: () => { wide = `${kind}/${step}`; app.reload(); } }, "show more") : null)] : []), news, list);
  if (listed || !run.live) return () => {};
  const [event, what] = kind === "train" ? ["step", "step"] : ["validation", "the validation of version"];
  return follow(run, since.event, async (heard) => {
    if (heard.kind !== event) return;
    const last = (await get(run, "/samples/steps").catch(() => kept))[kind].at(-1);
    if (last !== undefined && last !== newest) news.replaceChildren(el("a", { href: `#/samples/${kind}/${last}` }, `${what} ${last} is there`));
  }, app);
}

// All groups of a step; one of them is opened.
function overview(groups, open, address) {
  return section(`${groups.size} groups`, el("div", { class: "groups" }, table(["group", "scores", "mean", "advantages", "question"], [...groups].map(([name, samples]) => {
    const scores = samples.map((s) => s.score).filter((score) => typeof score === "number");
    const [least, most] = span((s) => s.advantage, samples.filter(learned));
    return [el("a", { href: address(name), "aria-current": name === open ? "true" : null }, name), scores.map((score) => number(score, 1)).join(" "),
      number(scores.reduce((sum, score) => sum + score, 0) / scores.length), samples.some(learned) ? `${number(least)} to ${number(most)}` : "not trained",
      samples[0].prompt.slice(0, 60)];
  }))));
}

function chooser(kept, kind, step, again) {
  const go = (event) => { location.hash = event.target.value; };
  const select = (label, name) => kept[name].length === 0 ? null : el("label", {}, `${label} `, el("select", { onchange: go },
    el("option", { value: `#/samples/${name}` }, "newest"),
    kept[name].slice().reverse().map((n) => el("option", { value: `#/samples/${name}/${n}`, selected: kind === name && n === step }, String(n)))));
  const colour = el("label", {}, "colour by ", el("select", { id: "colour", onchange: (event) => { mode = event.target.value; again(); } },
    Object.keys(MODES).map((name) => el("option", { selected: name === mode }, name))));
  const at = kept[kind]?.indexOf(step) ?? -1;
  const beside = (n, text) => (at < 0 || n === undefined ? null : el("a", { href: `#/samples/${kind}/${n}` }, text));
  return el("p", { class: "chooser" }, select("step", "train"), beside(kept[kind]?.[at - 1], "before"), beside(kept[kind]?.[at + 1], "after"),
    select("validation of version", "validation"),
    ["best", "worst", "errors"].map((order) => el("a", { href: `#/samples/${order}`, "aria-current": kind === order ? "page" : null }, order)), colour);
}

function group(name, samples) {
  const first = samples[0];
  const where = first.kind === "validation" ? `validation of version ${first.step}` : `step ${first.step}`;
  return section(`${where}, group ${name}`,
    el("pre", { class: "prompt" }, first.prompt),
    first.reference ? el("p", {}, "reference: ", el("code", {}, first.reference)) : null,
    el("p", { class: "legend", id: "meaning" }, MODES[mode][1](samples, versions(samples))),
    el("div", { class: "side-by-side" }, samples.map((sample) => card(sample, versions(samples)))));
}

function card(sample, range) {
  const rewards = Object.entries(sample.rewards ?? {}).map(([name, value]) =>
    `${name} ${number(value)}${sample.weights && name in sample.weights ? ` × ${sample.weights[name]}` : ""}`);
  const facts = [
    sample.score === null || sample.score === undefined ? "no score" : `score ${number(sample.score)}`, rewards.join(", "),
    typeof sample.advantage === "number" ? `advantage ${number(sample.advantage)}` : "", `${sample.response_tokens} tokens`,
    sample.ending, sample.oldest_version === sample.newest_version ? `version ${sample.newest_version}` : `versions ${sample.oldest_version} to ${sample.newest_version}`,
    sample.dropped ? `dropped: ${sample.dropped}` : "",
  ].filter(Boolean).join(" · ");
  return el("article", { class: "sample", tabindex: 0, "aria-label": `sample ${sample.index} of group ${sample.group}` },
    el("p", { class: "legend" }, `${sample.index}: ${facts}`), ...tokens(sample, range),
    sample.error ? el("pre", { class: "error" }, sample.error) : null);
}

function tokens(sample, range) {
  const pieces = sample.pieces ?? [];
  const box = el("pre", { class: "answer" });
  if (pieces.length === 0) {
    box.append(sample.answer);
    return [box];
  }
  pieces.slice(0, MOST_TOKENS).forEach((piece, i) => {
    const share = MODES[mode][0](sample, i, range);
    const token = el("span", { title: about(sample, i) }, piece);
    if (share !== null) token.style.backgroundColor = share < 0 ? `rgb(59 130 196 / ${-0.7 * share})` : `rgb(224 123 57 / ${0.7 * share})`;
    box.append(token);
  });
  const shown = Math.min(pieces.length, MOST_TOKENS);
  const told = pieces.slice(0, shown).join("");
  const follows = sample.answer.startsWith(told);
  const more = sample.response_tokens <= shown ? null : el("details", {},
    el("summary", {}, `${sample.response_tokens - shown} more tokens: ${follows ? "the rest" : "the whole answer"}`),
    el("pre", { class: "answer" }, follows ? sample.answer.slice(told.length) : sample.answer));
  const detail = el("p", { class: "legend", role: "status" });
  box.addEventListener("click", (event) => { if (event.target !== box) choose(event.target); });
  return [box, more, detail].filter(Boolean);
}

// Shows the numbers of a token below its sample.
function choose(token) {
  const card = token.closest("article");
  card.querySelector(".chosen")?.classList.remove("chosen");
  token.classList.add("chosen");
  card.querySelector("[role=status]").textContent = token.title;
  token.scrollIntoView({ block: "nearest" });
}

function about(sample, i) {
  const mine = sample.logprobs?.[i];
  const trainer = sample.trainer_logprobs?.[i];
  return [`token ${i}`, `engine ${number(mine)}`, trainer === undefined ? "" : `trainer ${number(trainer)}, trainer − engine ${number(trainer - mine)}`,
    `version ${versionOf(sample, i) ?? "unknown"}`, learned(sample) ? `advantage ${number(sample.advantage)}` : "not learned from"].filter(Boolean).join(", ");
}

export function move(by) {
  const all = [...document.querySelectorAll("article.sample")];
  const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(document.activeElement) + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

// Goes from token to token in the sample that has the focus.
export function step(by) {
  const tokens = [...(document.activeElement?.querySelectorAll(".answer > span") ?? [])];
  const next = tokens[tokens.findIndex((token) => token.classList.contains("chosen")) + by];
  if (next) choose(next);
  return Boolean(next);
}

// Goes to another group of the step.
export function turn(by) {
  const links = [...document.querySelectorAll(".groups a")];
  links[links.findIndex((link) => link.hasAttribute("aria-current")) + by]?.click();
}
