// The node that was chosen, in words and numbers.

import { NONE, age, bytes, colours, count, make, paper, say, share, time } from "./format.js";

const NEAREST = 6;

export class Detail {
  /** `go(name)` chooses another node. */
  constructor(box, cluster, go) {
    Object.assign(this, { box, cluster, go, name: "" });
    this.parts = {};
    addEventListener("colours", () => this.draw());
  }

  show(name) {
    if (name === this.name && this.box.childElementCount) { this.update(); return; }
    this.name = name;
    this.near = "";
    this.build();
    this.update();
  }

  build() {
    const part = (key, tag, options) => (this.parts[key] = make(tag, options));
    const fact = (key, label) => make("div", {}, make("dt", {}, label), part(key, "dd"));
    const bar = (key, tone) => make("div", { class: `bar ${tone}`, role: "presentation" }, part(key, "i"));
    this.parts = {};
    this.box.replaceChildren(
      make("h2", { id: "detail-title" }, part("name", "span"), part("state", "span")),
      part("about", "p", { class: "dim" }),
      part("models", "ul", { class: "models", "aria-label": "Models" }),
      make("div", { class: "row" }, "Requests", part("requests", "b")),
      bar("busy", "leaf"),
      make("div", { class: "row" }, "KV cache in use", part("kv", "b")),
      bar("level", ""),
      make("dl", { class: "facts" },
        fact("ttft", "First token, median"), fact("ttft95", "First token, p95"),
        fact("prefill", "Prompt tokens/s"), fact("decode", "Tokens/s of a stream"),
        fact("itl", "Between tokens"), fact("e2e", "Whole request"),
        fact("queued", "Prompt tokens queued"), fact("chunks", "Prefix chunks"),
        fact("rtt", "Round trip from here"), fact("age", "Age of what it told")),
      make("h3", {}, "Since this page opened: running and KV cache"),
      part("spark", "canvas", { role: "img", "aria-label": "Requests and KV cache since this page opened" }),
      part("own", "div"),
      part("nearTitle", "h3"),
      part("near", "ul", { class: "near" }),
    );
  }

  update() {
    const node = this.cluster.nodes.get(this.name);
    const { parts } = this;
    if (!node) { say(parts.state, "gone"); parts.state.className = "badge left"; return; }
    say(parts.name, node.name);
    say(parts.state, node.state);
    parts.state.className = `badge ${node.state}`;
    this.about(node);
    this.chips(node.models);
    const slots = node.slots ? ` of ${node.slots}` : "";
    say(parts.requests, node.running == null ? NONE : `${node.running}${slots} running, ${node.waiting} waiting`);
    parts.busy.style.width = `${100 * Math.min(1, (node.running ?? 0) / (node.slots || 1))}%`;
    say(parts.kv, share(node.kv_use));
    parts.level.style.width = `${100 * (node.kv_use ?? 0)}%`;
    const facts = {
      ttft: time(node.ttft_p50_ms), ttft95: time(node.ttft_p95_ms), itl: time(node.itl_p50_ms), e2e: time(node.e2e_p50_ms),
      prefill: count(node.prefill_tps || null), decode: count(node.decode_tps || null), queued: count(node.queued_tokens),
      chunks: count(node.chunks), rtt: node.isSelf ? NONE : time(node.rtt_ms), age: node.age_s == null ? NONE : `${node.age_s.toFixed(1)} s`,
    };
    for (const [key, text] of Object.entries(facts)) say(parts[key], text);
    this.own(node);
    this.nearest(node);
    this.draw();
  }

  about(node) {
    const seen = node.suspected_by ? `, suspected by ${node.suspected_by}` : node.avoided ? ", avoided after a refused connection" : "";
    const text = `${node.isSelf ? "this node, " : ""}${node.state} for ${age(node.state_age_s)}${seen}. `;
    const where = `${node.http ?? node.address}${node.version ? `, version ${node.version}` : ""}`;
    if (this.told === text + where) return;
    this.told = text + where;
    const link = node.http && !node.isSelf && node.state !== "dead"
      ? make("a", { href: `http://${node.http}/`, rel: "noreferrer", title: `The page of ${node.name}` }, where) : where;
    this.parts.about.replaceChildren(text, link);
  }

  chips(models) {
    const key = models.join("\u0000");
    if (this.parts.models.dataset.key === key) return;
    this.parts.models.dataset.key = key;
    this.parts.models.replaceChildren(...(models.length ? models : ["no model"]).map((model) => make("li", { class: "chip" }, model)));
  }

  own(node) {
    if (!node.isSelf) { if (this.parts.own.childElementCount) this.parts.own.replaceChildren(); return; }
    const { engine, kv } = this.cluster;
    const pool = kv.pool;
    const lines = [
      ["Engine", `${engine.state ?? NONE}${engine.version ? `, ${engine.version}` : ""}`],
      ["KV pool", pool ? `${bytes(pool.used_bytes)} of ${bytes(pool.capacity_bytes)}, ${count(pool.blocks)} blocks` : "off"],
    ];
    if (kv.corrupt) lines.push(["Damaged blocks refused", count(kv.corrupt)]);
    const key = JSON.stringify(lines);
    if (this.ownKey === key && this.parts.own.childElementCount) return;
    this.ownKey = key;
    this.parts.own.replaceChildren(...lines.map(([label, value]) => make("div", { class: "row" }, make("span", { class: "dim" }, label), make("span", {}, value))));
  }

  nearest(node) {
    const rows = this.cluster.neighbours(node.name).slice(0, NEAREST);
    const rates = new Map(this.cluster.rates.filter((rate) => rate.to === node.name).map((rate) => [rate.from, rate.rate]));
    say(this.parts.nearTitle, rows.length ? "Nearest nodes: round trip, speed of the last KV blocks from there" : "");
    const names = rows.map((row) => row.name).join("\u0000");
    if (this.near !== names) { // else a button that has the focus would lose it
      this.near = names;
      this.parts.near.replaceChildren(...rows.map((row) => {
        const button = make("button", { type: "button" }, row.name);
        button.addEventListener("click", () => this.go(row.name));
        return make("li", {}, button, make("span", { class: "dim" }));
      }));
    }
    rows.forEach((row, index) => {
      const rate = rates.get(row.name);
      say(this.parts.near.children[index].lastChild, `${time(row.ms)}${rate ? `, ${bytes(rate)}/s` : ""}`);
    });
  }

  draw() {
    const node = this.cluster.nodes.get(this.name);
    const sheet = node && this.parts.spark ? paper(this.parts.spark) : null;
    if (!sheet) return;
    const { context, width, height } = sheet;
    const c = colours();
    const most = Math.max(4, ...node.past.map((moment) => moment.running + moment.waiting));
    const step = width / Math.max(60, node.past.length), from = width - node.past.length * step;
    node.past.forEach((moment, index) => {
      const x = from + index * step;
      const running = (moment.running / most) * (height - 2), waiting = (moment.waiting / most) * (height - 2);
      context.fillStyle = c.leaf;
      context.fillRect(x, height - running, Math.max(1, step - 0.4), running);
      context.fillStyle = c.amber;
      context.fillRect(x, height - running - waiting, Math.max(1, step - 0.4), waiting);
    });
    context.strokeStyle = c.grape;
    context.lineWidth = 1.6;
    context.beginPath();
    node.past.forEach((moment, index) => context.lineTo(from + (index + 0.5) * step, (height - 2) * (1 - moment.kv) + 1));
    context.stroke();
    context.strokeStyle = c.line;
    context.lineWidth = 1;
    context.strokeRect(0.5, 0.5, width - 1, height - 1);
  }
}
