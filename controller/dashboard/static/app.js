// One page: login, the pages by their hash, keys and buttons.

import { AGAIN, Refused, get, login, logout, post, session } from "/static/api.js";
import { byId, el } from "/static/dom.js";
import { config, logs } from "/static/files.js";
import { show as front } from "/static/front.js";
import { move, show as samples, step, turn as turnGroup } from "/static/samples.js";
import { show as scaling } from "/static/scaling.js";
import { show as reference } from "/static/reference.js";
import { show as timeline } from "/static/timeline.js";

const PAGES = [["", "Front", front], ["samples", "Samples", samples], ["timeline", "Timeline", timeline], ["scaling", "Scaling", scaling], ["config", "Config", config], ["logs", "Logs", logs], ["api", "API", reference]];
const BUTTONS = { pause: "", resume: "", checkpoint: "", stop: "Stop the job? It ends, and can be resumed later." };
const ASKED = { checkpoint: "checkpoint: asked for, it is saved after the step under way", stop: "stopping …", drain: "draining …", scale: "scale: asked for; replicas come, or finish and leave" };
let runs = [];
let chosen = 0;
let close = () => {};
let turn = 0;

const app = {
  chosen: (known) => known[Math.min(chosen, known.length - 1)],
  runPicker: (known) => known.length < 2 ? el("span") : el("p", {}, el("label", {}, "run ", el("select", {
    onchange: (event) => { chosen = event.target.selectedIndex; route(); } }, known.map((run, i) => el("option", { selected: i === chosen }, run.name))))),
  reload: () => route(),
  scale: (run, replicas) => operate(run, "scale", "", "/autoscale", { replicas }),
  failed: (error, passing = true) => { if (error.status === 401) askToken("The session has ended."); else say(error.message, passing); },
  lost: (gone) => { if (gone) say("The connection is gone; trying again …", true); else if (passes) say(""); },
};

// passing: until an answer comes again.
let passes = false;
const say = (text, passing = false) => { byId("notice").textContent = text; passes = passing; };

async function route() {
  const [page = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const [, title, show] = PAGES.find(([name]) => name === page) ?? PAGES[0];
  const mine = (turn += 1);
  close();
  close = () => {};
  for (const link of byId("pages").children) {
    link.removeAttribute("aria-current");
    if (link.textContent === title) link.setAttribute("aria-current", "page");
  }
  try {
    const fresh = el("main", { id: "page", tabindex: -1 });
    byId("page").replaceWith(fresh);
    const end = await show(fresh, runs, app, rest.filter(Boolean));
    if (mine !== turn) return end();
    close = end;
    app.lost(false);
  } catch (error) {
    if (mine !== turn) return;
    app.failed(error);
    if (error.status === 0 || error.status >= 500) setTimeout(() => { if (mine === turn) route(); }, AGAIN);
  }
}

function begin(found) {
  runs = found.runs;
  byId("title").textContent = document.title = runs.map((run) => run.name).join(", ");
  byId("pages").replaceChildren(...PAGES.map(([name, title], i) => el("a", { href: `#/${name}`, title: `key ${i + 1}` }, title)));
  const [run] = runs;
  byId("buttons").replaceChildren(
    ...(run.live ? [...Object.entries(BUTTONS).map(([action, question]) => el("button", { onclick: () => operate(run, action, question) }, action)),
      el("button", { onclick: () => drain(run) }, "drain …")] : []),
    el("button", { onclick: async () => { await logout().catch(() => null); askToken(""); } }, "log out"));
  say("");
  route();
}

async function operate(run, action, question, path = `/job/${action}`, body = undefined) {
  if (question && !(await ask(question, action))) return;
  try {
    await post(run, path, body);
    say(ASKED[action] ?? `${action}: done`);
    route();
  } catch (error) {
    app.failed(error, false);
  }
}

async function drain(run) {
  let names;
  try {
    names = (await get(run, "/overview")).replicas.filter((replica) => replica.role === "rollout" && replica.state === "live");
  } catch (error) {
    return app.failed(error, false);
  }
  const select = el("select", { "aria-label": "Replica" }, names.map((replica) => el("option", { value: replica.replica_id }, replica.name)));
  if (names.length === 0) say("No rollout replica is live.");
  else if (await ask("Let this replica finish its work and leave?", "drain", select)) {
    operate(run, "drain", "", `/replicas/${encodeURIComponent(select.value)}/drain`);
  }
}

function ask(question, yes, ...more) {
  const dialog = byId("dialog");
  return new Promise((resolve) => {
    dialog.replaceChildren(el("p", {}, question), ...more, el("p", {},
      el("button", { onclick: () => dialog.close("yes") }, yes), " ", el("button", { autofocus: true, onclick: () => dialog.close("") }, "cancel")));
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
    dialog.returnValue = "";
    dialog.showModal();
  });
}

function askToken(why) {
  close();
  close = () => {};
  turn += 1;
  byId("pages").replaceChildren();
  byId("buttons").replaceChildren();
  const field = el("input", { id: "token", type: "password", autocomplete: "current-password", required: true });
  const enter = (event) => { event.preventDefault(); tryToken(field.value.trim()); };
  byId("page").replaceChildren(el("form", { onsubmit: enter }, el("p", {}, el("label", { for: "token" },
    "The token of the job: it is in .tokens/user of the run directory; cosmos-launch dashboard prints a link that holds it.")),
    field, " ", el("button", {}, "log in")));
  field.focus();
  say(why);
}

async function tryToken(token) {
  try {
    begin(await login(token));
  } catch (error) {
    askToken(error.status === 401 ? "That is not the token of this job." : error.message);
  }
}

const KEYS = "1 to 7: pages · j, k: next and previous sample · n, p: group · ←, →: token of the sample · ?: this text · Esc: close";

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || byId("dialog").open) return;
  const page = PAGES[Number(event.key) - 1];
  if (page && runs.length) location.hash = `#/${page[0]}`;
  else if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
  else if (event.key === "n" || event.key === "p") turnGroup(event.key === "n" ? 1 : -1);
  else if (event.key === "ArrowRight" || event.key === "ArrowLeft") { if (step(event.key === "ArrowRight" ? 1 : -1)) event.preventDefault(); }
  else if (event.key === "?") say(KEYS);
  else if (event.key === "Escape") say("");
});
window.addEventListener("hashchange", () => { if (location.hash.startsWith("#token=")) start(); else if (runs.length) route(); });

async function start() {
  const { hash } = location;
  if (hash.startsWith("#token=")) {
    history.replaceState(null, "", "/#/");
    await tryToken(hash.slice("#token=".length));
    return;
  }
  try {
    begin(await session());
  } catch (error) {
    askToken(error instanceof Refused && error.status === 401 ? "" : error.message);
  }
}

start();
