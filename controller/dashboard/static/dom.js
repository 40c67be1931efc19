// Elements and numbers. Text of others only ever becomes text: nothing here takes markup.

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [property, v] of Object.entries(value)) node.style.setProperty(property, v);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

export function number(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  return Math.abs(value) >= 1e5 ? value.toExponential(2) : String(Number(value.toPrecision(digits + 1)));
}

export const percent = (value) => (typeof value === "number" ? `${Math.round(value * 100)} %` : "–");

export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

export const bytes = (n) => (n < 1024 ? `${n} B` : n < 1048576 ? `${number(n / 1024)} KiB` : `${number(n / 1048576)} MiB`);

export function clock(at) {
  const then = new Date(at * 1000);
  return then.toDateString() === new Date().toDateString() ? then.toLocaleTimeString() : then.toLocaleString();
}

export function table(head, rows) {
  const cells = (row, kind) => el("tr", {}, row.map((cell) => el(kind, {}, cell)));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, cells(head, "th")), el("tbody", {}, rows.map((row) => cells(row, "td")))));
}

export const section = (title, ...children) => el("section", { "aria-label": title }, el("h2", {}, title), ...children);

export const nothing = (text) => el("p", { class: "nothing" }, text);

// Gives a box these children. What is equal stays as it is; open details stay open by their data-key, and focus stays.
export function renew(box, children) {
  const focus = box.contains(document.activeElement) ? document.activeElement : null;
  const open = new Set([...box.querySelectorAll("details[open]")].map((details) => details.dataset.key));
  const old = [...box.children];
  const nodes = children.filter(Boolean).map((child) => {
    for (const details of child.querySelectorAll("details")) details.open = open.has(details.dataset.key);
    return old.find((known) => known.isEqualNode(child)) ?? child;
  });
  for (const known of old) if (!nodes.includes(known)) known.remove();
  nodes.forEach((node, i) => { if (box.children[i] !== node) box.insertBefore(node, box.children[i] ?? null); });
  if (focus && !focus.isConnected) [...box.querySelectorAll(focus.tagName)].find((node) => node.isEqualNode(focus))?.focus({ preventScroll: true });
}
