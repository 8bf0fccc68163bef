// Puts the parts together: events in, the parts draw themselves anew, each in a task of its own so that none is long.

import { Charts } from "./charts.js";
import { Cluster } from "./cluster.js";
import { Detail } from "./detail.js";
import { Feed } from "./feed.js";
import { NONE, count, make, say, share, time } from "./format.js";
import { Nodes, Requests } from "./tables.js";
import { Vine } from "./vine.js";

const $ = (id) => document.getElementById(id);
const SPANS = [120, 300, 900];
const TILE_SPAN_S = 300;

const cluster = new Cluster();
const vine = new Vine($("map"), cluster, choose);
const charts = new Charts($("charts"), cluster);
const detail = new Detail($("detail"), cluster, choose);
const requests = new Requests($("requests"), $("requests-note"), cluster, choose);
const nodes = new Nodes($("nodes"), $("nodes-note"), cluster, choose);
const parts = [tiles, () => vine.update(), () => detail.update(), () => charts.draw(), () => requests.update(), () => nodes.update()];
let chosen = "";
let waiting = false;

function choose(name, spoken = false) {
  chosen = name;
  vine.choose(name);
  nodes.choose(name);
  detail.show(name);
  if (spoken) describe(cluster.nodes.get(name));
}

function describe(node) {
  if (!node) return;
  const load = node.running == null ? "" : `, ${node.running} running, ${node.waiting} waiting, KV cache ${share(node.kv_use)}`;
  say($("said"), `${node.name}: ${node.state}${load}`);
}

/** One part after the other, with room between them for the browser. */
function draw() {
  if (waiting) return;
  waiting = true;
  let index = 0;
  const next = () => {
    parts[index]();
    index += 1;
    if (index < parts.length) setTimeout(next); else waiting = false;
  };
  next();
}

function told(kind, message) {
  if (kind === "first") {
    if (cluster.build && cluster.build !== message.build) { location.reload(); return; }
    cluster.first(message);
    say($("cluster"), cluster.cluster === "default" ? "" : cluster.cluster);
    say($("build"), `page ${message.build}`);
    if (!cluster.nodes.has(chosen)) choose(cluster.self);
  } else {
    cluster.apply(message);
  }
  if (!cluster.nodes.has(chosen)) choose(cluster.self);
  if (!document.hidden) draw();
}

function state(word) {
  const texts = { connecting: "connecting", live: "live", lost: "this node does not answer, trying again" };
  $("link").className = `link ${word}`;
  say($("link-text"), texts[word]);
}

function tiles() {
  const all = [...cluster.nodes.values()];
  const living = all.filter((node) => !["dead", "left"].includes(node.state));
  const sum = (key) => living.reduce((total, node) => total + (node[key] ?? 0), 0);
  const totals = cluster.totals(TILE_SPAN_S);
  const firsts = living.map((node) => node.ttft_p50_ms).filter(Boolean).sort((a, b) => a - b);
  const pulled = Math.min(totals.cached_tokens, totals.pulled_blocks * (cluster.kv.block_tokens || 0));
  const ready = living.filter((node) => node.state === "alive").length;
  const shown = [
    [count(living.length), ready === living.length ? "all ready" : `${ready} ready`, living.length === 1 ? "node" : "nodes"],
    [count(sum("running")), sum("waiting") ? `+ ${count(sum("waiting"))} waiting` : "", "requests run in the cluster"],
    [share(living.length ? sum("kv_use") / living.length : null), "", "of the KV cache in use, mean"],
    [time(firsts[Math.floor(firsts.length / 2)]), "", "to the first token, median node"],
    [totals.prompt_tokens ? share(totals.cached_tokens / totals.prompt_tokens) : NONE, "", "prompt tokens cached here, 5 min"],
    [count(pulled), "", "prompt tokens pulled here, 5 min"],
  ];
  const box = $("tiles");
  if (!box.childElementCount) box.append(...shown.map(() => make("div", { class: "tile" }, make("b", {}, make("span"), " ", make("small")), make("span"))));
  shown.forEach(([value, more, label], index) => {
    const [head, foot] = box.children[index].children;
    say(head.firstChild, value);
    say(head.lastChild, more);
    say(foot, label);
  });
  titles(living);
}

function titles(living) {
  const models = new Set(living.flatMap((node) => node.models));
  say($("seen"), `as ${cluster.self} sees it, ${models.size === 1 ? [...models][0] : `${models.size} models`}`);
  const title = `${cluster.self}, ${living.length} ${living.length === 1 ? "node" : "nodes"}: Grapevine`;
  if (document.title !== title) document.title = title;
  $("map").setAttribute("aria-label", `The cluster: ${living.length} of ${cluster.nodes.size} nodes live. Arrow keys choose a node.`);
  say($("map-note"), living.length > 1
    ? "The leaf marks the node that you look through. Requests are drawn where they pass through it; KV blocks between any two."
    : "One node, and a complete server. Start a second one with --join and it appears here.");
  const { engine } = cluster;
  const quiet = engine.state === "ready" || !engine.state;
  $("notice").hidden = quiet;
  if (!quiet) say($("notice"), `The engine of ${cluster.self} is ${engine.state}${engine.reason || engine.progress ? `: ${engine.progress || engine.reason}` : ""}`);
}

for (const seconds of SPANS) {
  const button = make("button", { type: "button", "aria-pressed": String(seconds === charts.seconds) }, `${seconds / 60} min`);
  button.addEventListener("click", () => {
    for (const other of $("spans").children) other.setAttribute("aria-pressed", String(other === button));
    charts.span(seconds);
  });
  $("spans").append(button);
}
addEventListener("visibilitychange", () => { if (!document.hidden && cluster.self) draw(); });
new Feed("page/events", told, state);
