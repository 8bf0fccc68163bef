// The two tables. Rows are kept from tick to tick and only what changed is written.

import { NONE, age, count, make, say, share, time } from "./format.js";

/** Put `rows` into `body`, each with the element that `build` made for its key once. */
function fill(body, known, rows, key, build, update) {
  const wanted = new Set(rows.map(key));
  for (const [name, row] of known) if (!wanted.has(name)) { row.element.remove(); known.delete(name); }
  let at = body.firstElementChild;
  for (const data of rows) {
    const name = key(data);
    let row = known.get(name);
    if (!row) { row = build(data); known.set(name, row); }
    update(row, data);
    if (row.element === at) at = at.nextElementSibling;
    else body.insertBefore(row.element, at);
  }
}

function cells(names) {
  const parts = Object.fromEntries(names.map(([name, kind]) => [name, make("td", kind ? { class: kind } : {})]));
  return { parts, element: make("tr", {}, ...Object.values(parts)) };
}

function frame(table, caption, heads) {
  const body = make("tbody");
  const row = make("tr", {}, ...heads.map((head) => make("th", { scope: "col", class: head.kind ?? "" }, head.label)));
  table.replaceChildren(make("caption", { class: "hidden" }, caption), make("thead", {}, row), body);
  return body;
}

const REQUEST = [
  ["when", "n"], ["request"], ["model"], ["target"], ["why", "why"], ["tokens", "n"], ["cached", "n"], ["pulled"], ["first", "n"], ["status", "n"],
];

export class Requests {
  constructor(table, note, cluster, go) {
    Object.assign(this, { table, note, cluster, go, known: new Map(), quiet: true });
    const labels = ["ago", "request", "model", "ran on", "why there", "prompt", "cached", "KV pulled", "first byte", "status"];
    this.body = frame(table, "The last requests, newest first", labels.map((label, index) => ({ label, kind: REQUEST[index][1] === "n" ? "n" : "" })));
    this.empty = make("td", { class: "empty", colspan: String(labels.length) }, "None yet. Send one: curl with any OpenAI request to /v1/chat/completions of this node.");
  }

  update() {
    const rows = this.cluster.requests;
    const none = make("tr", {}, this.empty);
    if (!rows.length) { this.known.clear(); this.body.replaceChildren(none); this.quiet = true; return; }
    if (this.empty.isConnected) this.body.replaceChildren();
    fill(this.body, this.known, rows, (row) => row.seq, () => this.row(), (row, data) => this.write(row, data));
    this.quiet = false;
    this.table.dataset.newest = rows[0].seq;
    say(this.note, `the last ${rows.length}; prompt and cached in tokens`);
  }

  row() {
    const row = cells(REQUEST);
    if (!this.quiet) row.element.className = "fresh";
    row.parts.request.append(make("code"));
    const button = make("button", { type: "button" });
    button.addEventListener("click", () => { if (this.cluster.nodes.has(button.textContent)) this.go(button.textContent); });
    row.parts.target.append(button);
    row.parts.why.append(make("span"), make("small"));
    return row;
  }

  write(row, data) {
    const { parts } = row;
    say(parts.when, age((performance.now() - data.at) / 1000));
    if (row.data === data) return;
    row.data = data;
    say(parts.request.firstChild, data.rid || NONE);
    parts.request.firstChild.title = data.rid;
    say(parts.model, data.model ?? NONE);
    say(parts.target.firstChild, data.target ?? NONE);
    say(parts.why.firstChild, data.reason);
    say(parts.why.lastChild, why(data));
    say(parts.tokens, count(data.prompt_tokens));
    say(parts.cached, data.cached_tokens ? count(data.cached_tokens) : NONE);
    say(parts.pulled, data.source ? `${data.pulled_blocks} blocks from ${data.source}` : NONE);
    say(parts.first, time(data.first_byte_ms));
    parts.first.title = data.expected_ms ? `expected ${time(data.expected_ms)} after the decision` : "";
    say(parts.status, data.broke ? `${data.status}, ${data.broke}` : String(data.status));
    parts.status.className = `n ${data.broke || data.status >= 500 ? "dead" : data.status >= 400 ? "suspect" : ""}`;
  }
}

/** What the others would have cost, as far as they were weighed, and who refused. */
function why(data) {
  const costs = data.others.slice(0, 2).map(([name, ms]) => `${name} ${time(ms)}`);
  const parts = [];
  if (data.cost_ms) parts.push(`cost ${time(data.cost_ms)}${costs.length ? `, ${costs.join(", ")}` : ""}`);
  if (data.refused_by.length) parts.push(`full: ${data.refused_by.join(", ")}`);
  return parts.join("; ");
}

const NODE = [
  { key: "name", label: "node", text: (node) => node.name },
  { key: "state", label: "state", text: (node) => node.state },
  { key: "models", label: "models", text: (node) => node.models.join(", ") || NONE, value: (node) => node.models.join() },
  { key: "running", label: "running", kind: "n", text: (node) => count(node.running) },
  { key: "waiting", label: "waiting", kind: "n", text: (node) => count(node.waiting) },
  { key: "kv_use", label: "KV use", kind: "n", text: (node) => share(node.kv_use) },
  { key: "ttft_p50_ms", label: "first token", kind: "n", text: (node) => time(node.ttft_p50_ms) },
  { key: "prefill_tps", label: "prompt tokens/s", kind: "n", text: (node) => count(node.prefill_tps || null) },
  { key: "decode_tps", label: "tokens/s", kind: "n", text: (node) => count(node.decode_tps || null) },
  { key: "rtt_ms", label: "round trip", kind: "n", text: (node) => (node.isSelf ? NONE : time(node.rtt_ms)) },
  { key: "chunks", label: "prefixes", kind: "n", text: (node) => count(node.chunks) },
  { key: "age_s", label: "age", kind: "n", text: (node) => (node.age_s == null ? NONE : `${node.age_s.toFixed(1)} s`) },
];

export class Nodes {
  constructor(table, note, cluster, go) {
    Object.assign(this, { note, cluster, go, known: new Map(), by: null, up: true });
    this.body = frame(table, "Every node, with its load", NODE.map(({ key, label, kind }) => {
      const button = make("button", { type: "button", title: `Sort by ${label}` }, label);
      button.addEventListener("click", () => this.sort(key));
      return { label: button, kind };
    }));
    this.heads = [...table.querySelectorAll("th")];
  }

  choose(name) {
    this.choice = name;
    for (const [key, row] of this.known) row.element.classList.toggle("chosen", key === name);
  }

  sort(key) {
    this.up = this.by === key ? !this.up : ["name", "state", "models", "rtt_ms"].includes(key);
    this.by = key;
    this.heads.forEach((head, index) => {
      if (NODE[index].key === key) head.setAttribute("aria-sort", this.up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    this.update();
  }

  update() {
    const rows = [...this.cluster.nodes.values()];
    if (this.by) {
      const column = NODE.find((one) => one.key === this.by);
      const value = column.value ?? ((node) => node[column.key] ?? -1);
      rows.sort((a, b) => (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0) * (this.up ? 1 : -1));
    }
    fill(this.body, this.known, rows, (node) => node.name, (node) => this.row(node), (row, node) => this.write(row, node));
    say(this.note, this.cluster.hidden ? `${rows.length} shown, ${this.cluster.hidden} more are not` : "");
  }

  row(node) {
    const row = cells(NODE.map(({ key, kind }) => [key, kind]));
    const button = make("button", { type: "button" });
    button.addEventListener("click", () => this.go(node.name));
    row.parts.name.append(button);
    row.element.classList.toggle("chosen", node.name === this.choice);
    return row;
  }

  write(row, node) {
    for (const { key, text } of NODE) say(key === "name" ? row.parts.name.firstChild : row.parts[key], text(node));
    if (row.parts.state.className !== node.state) row.parts.state.className = node.state;
    if (node.isSelf && !row.marked) { row.marked = true; row.parts.name.append(" (this one)"); }
  }
}
