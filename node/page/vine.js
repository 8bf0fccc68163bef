// The map: nodes as grapes on a canvas. Ring: requests; level: KV cache; dots and squares on the tendrils: what flows.
// It draws when something changed, and frame by frame only while something moves. Edges and nodes lie on layers of their
// own, so that a frame in which only dots fly costs two copies.

import { colours, paper, time } from "./format.js";

const MOST_DOTS = 240;
const FLIGHT_MS = { forward: 900, pull: 1300 };
const GLOW_MS = 3500;
const ROUND = 14; // up to so many nodes stand in a ring, more of them in a bunch
const LABELLED_EDGES = 12;
const NEAR_EDGES = 6; // drawn of the chosen node of a bunch
const GLYPHS = { dead: "×", left: "·", suspect: "?", loading: "…", draining: "↓" };
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Vine {
  /** `chosen(name)` is called when somebody chooses a node. */
  constructor(canvas, cluster, chosen) {
    Object.assign(this, { canvas, cluster, chosen, choice: "", hover: "", frame: 0 });
    this.slots = [];
    this.places = new Map();
    this.dots = [];
    this.peak = 8;
    this.glows = new Map();
    this.under = document.createElement("canvas");
    this.over = document.createElement("canvas");
    this.stale = true;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.touch(""));
    canvas.addEventListener("click", (event) => {
      const name = this.at(event);
      if (name) this.chosen(name, true);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.renew()).observe(canvas);
    addEventListener("colours", () => this.renew());
  }

  choose(name) {
    this.choice = name;
    this.renew();
  }

  /** Take what the cluster is now. */
  update() {
    this.seat();
    this.peak = this.cluster.peak();
    const now = performance.now();
    for (const flow of this.cluster.flows) {
      if (!this.places.has(flow.from) || !this.places.has(flow.to)) continue;
      this.glows.set(`${flow.kind}\u0000${flow.from}\u0000${flow.to}`, { ...flow, until: now + GLOW_MS });
      const dots = Math.min(flow.kind === "pull" ? 5 : flow.count, 6);
      for (let i = 0; i < dots && !still.matches && this.dots.length < MOST_DOTS; i += 1) {
        const spread = flow.kind === "pull" ? 90 * i : (900 * i) / dots;
        this.dots.push({ kind: flow.kind, from: flow.from, to: flow.to, start: now + spread });
      }
    }
    this.renew();
  }

  /** Each node keeps its seat while it is there; the seats close up when many are empty. */
  seat() {
    const { nodes } = this.cluster;
    for (const [index, name] of this.slots.entries()) if (name && !nodes.has(name)) this.slots[index] = null;
    for (const name of this.places.keys()) if (!nodes.has(name)) this.places.delete(name);
    const seated = new Set(this.slots);
    for (const name of nodes.keys()) {
      if (seated.has(name)) continue;
      const free = this.slots.indexOf(null);
      if (free < 0) this.slots.push(name); else this.slots[free] = name;
    }
    const gaps = this.slots.filter((name) => name === null).length;
    if (gaps && (this.slots.length <= ROUND || gaps > this.slots.length / 4)) this.slots = this.slots.filter(Boolean);
  }

  /** Where each node belongs, in pixels. */
  aim(width, height) {
    const n = this.slots.length;
    const round = n <= ROUND;
    const area = (Math.PI / 4) * width * height;
    const radius = round
      ? Math.max(16, Math.min(62, 0.2 * Math.min(width, height), 0.9 * (Math.min(width, height) / (n + 1)) + 8))
      : Math.max(4, Math.min(24, 0.4 * Math.sqrt(area / n)));
    const a = width / 2 - radius - (round ? 56 : 10), b = height / 2 - radius - (round ? 38 : 16);
    const bunch = round ? [] : packed(n, a, b);
    this.slots.forEach((name, index) => {
      if (!name) return;
      let x = 0, y = 0;
      if (round && n > 1) {
        const angle = (2 * Math.PI * index) / n - (n === 2 ? Math.PI : Math.PI / 2);
        x = Math.cos(angle) * Math.min(a, 1.9 * b); y = Math.sin(angle) * b + (n === 3 ? 0.2 * b : 0);
      } else if (!round) {
        [x, y] = bunch[index];
      }
      const goal = { gx: width / 2 + x, gy: height / 2 + y - (round ? 6 : 0), gr: radius };
      const place = this.places.get(name);
      if (place) Object.assign(place, goal);
      else this.places.set(name, { ...goal, x: goal.gx, y: goal.gy, r: still.matches ? radius : 2 });
    });
  }

  /** Draw everything anew. */
  renew() {
    this.stale = true;
    this.refresh();
  }

  /** Draw what moves anew. */
  refresh() {
    if (!this.frame && !document.hidden) this.frame = requestAnimationFrame((now) => this.draw(now));
  }

  draw(now) {
    this.frame = 0;
    const sheet = paper(this.canvas);
    if (!sheet) return;
    const { context, width, height } = sheet;
    const c = colours();
    if (width !== this.width || height !== this.height) this.stale = true;
    Object.assign(this, { width, height });
    if (this.stale) this.aim(width, height);
    const moving = this.step();
    if (this.stale || moving) this.drawLayers(c);
    this.stale = false;
    context.lineCap = "round";
    context.drawImage(this.under, 0, 0, width, height);
    this.drawGlows(context, c, now);
    const flying = this.drawDots(context, c, now);
    context.drawImage(this.over, 0, 0, width, height);
    if (moving || flying) this.refresh();
    else if (this.glows.size) setTimeout(() => this.refresh(), GLOW_MS / 30); // they fade slowly
  }

  drawLayers(c) {
    const below = this.layer(this.under), above = this.layer(this.over);
    const labels = this.drawEdges(below, c);
    this.drawTimes(above, c, labels);
    for (const [name, place] of this.places) this.drawNode(above, c, this.cluster.nodes.get(name), place);
    const named = this.slots.length > ROUND ? [this.cluster.self, this.choice, this.hover] : [];
    for (const name of new Set(named)) {
      const place = this.places.get(name);
      if (place) this.drawName(above, c, this.cluster.nodes.get(name), place, true);
    }
  }

  /** A cleared layer as large as the canvas. */
  layer(canvas) {
    const { width, height } = this.canvas;
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    const ratio = width / this.width;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.lineCap = "round";
    return context;
  }

  step() {
    let moving = false;
    for (const place of this.places.values()) {
      for (const [key, goal] of [["x", "gx"], ["y", "gy"], ["r", "gr"]]) {
        const left = place[goal] - place[key];
        if (Math.abs(left) < 0.3 || still.matches) place[key] = place[goal];
        else { place[key] += left * 0.16; moving = true; }
      }
    }
    return moving;
  }

  /** The tendril between two places bends a little towards the middle; the same way in both directions. */
  bend(from, to) {
    const mx = (from.x + to.x) / 2, my = (from.y + to.y) / 2;
    return [mx + (this.width / 2 - mx) * 0.16, my + (this.height / 2 - my) * 0.22];
  }

  tendril(context, from, to) {
    const [cx, cy] = this.bend(from, to);
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.quadraticCurveTo(cx, cy, to.x, to.y);
    context.stroke();
  }

  drawEdges(context, c) {
    const all = this.slots.length <= ROUND;
    const focus = this.hover || this.choice;
    const labels = [];
    const edges = all ? this.cluster.edges : this.near(focus);
    for (const edge of edges) {
      const from = this.places.get(edge.a), to = this.places.get(edge.b);
      if (!from || !to) continue;
      const near = edge.a === focus || edge.b === focus;
      context.strokeStyle = near && !all ? c.grape : c.vine;
      context.globalAlpha = near ? 1 : 0.75;
      context.lineWidth = edge.ms < 1 ? 2.4 : edge.ms < 10 ? 1.8 : 1.2;
      this.tendril(context, from, to);
      if (all && (near || this.cluster.edges.length <= LABELLED_EDGES)) labels.push([edge, from, to]);
    }
    context.globalAlpha = 1;
    return labels;
  }

  /** The shortest edges of one node: more of them would hide the bunch. */
  near(name) {
    const own = this.cluster.edges.filter((edge) => edge.a === name || edge.b === name);
    return own.sort((x, y) => x.ms - y.ms).slice(0, NEAR_EDGES);
  }

  drawTimes(context, c, labels) {
    context.font = "11.5px system-ui, sans-serif";
    context.textAlign = "center"; context.textBaseline = "middle";
    for (const [edge, from, to] of labels) {
      const [cx, cy] = this.bend(from, to);
      this.text(context, time(edge.ms), (from.x + 2 * cx + to.x) / 4, (from.y + 2 * cy + to.y) / 4, c.dim, c.card);
    }
  }

  drawGlows(context, c, now) {
    for (const [key, glow] of this.glows) {
      const from = this.places.get(glow.from), to = this.places.get(glow.to);
      if (now >= glow.until || !from || !to) { this.glows.delete(key); continue; }
      context.globalAlpha = 0.65 * ((glow.until - now) / GLOW_MS);
      context.strokeStyle = glow.kind === "pull" ? c.grape : c.sky;
      context.lineWidth = (glow.kind === "pull" ? 4 : 2.5) * (this.slots.length > ROUND ? 0.5 : 1);
      this.tendril(context, from, to);
    }
    context.globalAlpha = 1;
  }

  drawDots(context, c, now) {
    this.dots = this.dots.filter((dot) => now < dot.start + FLIGHT_MS[dot.kind] && this.places.has(dot.from) && this.places.has(dot.to));
    for (const dot of this.dots) {
      const t = (now - dot.start) / FLIGHT_MS[dot.kind];
      if (t < 0) continue;
      const from = this.places.get(dot.from), to = this.places.get(dot.to);
      const [cx, cy] = this.bend(from, to);
      const s = t * t * (3 - 2 * t), u = 1 - s;
      const x = u * u * from.x + 2 * u * s * cx + s * s * to.x, y = u * u * from.y + 2 * u * s * cy + s * s * to.y;
      if (dot.kind === "pull") {
        context.fillStyle = c.grape;
        context.fillRect(x - 4, y - 4, 8, 8);
      } else {
        context.fillStyle = c.sky;
        context.beginPath(); context.arc(x, y, 4, 0, 7); context.fill();
      }
    }
    return this.dots.length > 0;
  }

  drawNode(context, c, node, place) {
    if (!node) return;
    const { x, y, r } = place;
    const gone = node.state === "dead" || node.state === "left";
    const tone = { alive: c.vine, loading: c.sky, draining: c.amber, suspect: c.amber, dead: c.red, left: c.dim }[node.state];
    context.globalAlpha = 1;
    context.fillStyle = c.card;
    context.beginPath(); context.arc(x, y, r + 5, 0, 7); context.fill();
    context.globalAlpha = gone ? 0.5 : 1;
    context.fillStyle = c.rind;
    context.beginPath(); context.arc(x, y, r, 0, 7); context.fill();
    if (!gone && node.kv_use > 0) {
      const level = Math.max(node.kv_use, 1.5 / r);
      const angle = Math.asin(Math.max(-1, Math.min(1, 1 - 2 * level)));
      context.fillStyle = c.grape;
      context.globalAlpha = 0.72;
      context.beginPath(); context.arc(x, y, r, angle, Math.PI - angle); context.fill();
      context.globalAlpha = 1;
    }
    if (!gone && r > 9) { // the light on a grape
      context.globalAlpha = 0.16;
      context.fillStyle = "#fff";
      context.beginPath(); context.ellipse(x - r * 0.36, y - r * 0.42, r * 0.3, r * 0.2, -0.7, 0, 7); context.fill();
      context.globalAlpha = 1;
    }
    const width = Math.max(2, Math.min(6, r * 0.13));
    context.lineWidth = node.state === "alive" ? Math.max(1, width / 2) : Math.max(1.5, width * 0.7);
    context.strokeStyle = tone;
    context.setLineDash(node.state === "loading" || node.state === "left" ? [3, 5] : []);
    context.beginPath(); context.arc(x, y, r, 0, 7); context.stroke();
    context.setLineDash([]);
    if (!gone) {
      const running = ((node.running ?? 0) / this.peak) * 2 * Math.PI, waiting = ((node.waiting ?? 0) / this.peak) * 2 * Math.PI;
      context.lineWidth = width;
      if (running) this.arc(context, c.leaf, x, y, r + width / 2, -Math.PI / 2, running);
      if (waiting) this.arc(context, c.amber, x, y, r + width / 2, -Math.PI / 2 + running, waiting);
    }
    if (node.name === this.choice || node.name === this.hover) {
      context.lineWidth = 2;
      context.strokeStyle = c.grape;
      context.globalAlpha = node.name === this.choice ? 1 : 0.5;
      context.beginPath(); context.arc(x, y, r + width + 4, 0, 7); context.stroke();
    }
    context.globalAlpha = 1;
    if (node.isSelf) this.leaf(context, c, x, y - r - width - 1, Math.max(0.55, r / 44));
    this.drawInside(context, c, node, x, y, r);
    if (this.slots.length <= ROUND) this.drawName(context, c, node, place, false);
  }

  drawInside(context, c, node, x, y, r) {
    if (r < 7) return;
    const glyph = GLYPHS[node.state];
    const waiting = node.waiting ? `+${node.waiting}` : "";
    context.textAlign = "center"; context.textBaseline = "middle";
    // The colour of text reads well on both, above the level and below it.
    context.fillStyle = glyph || node.running || node.waiting ? c.ink : c.dim;
    context.font = `650 ${Math.max(9, Math.min(26, r * 0.62))}px system-ui, sans-serif`;
    context.fillText(glyph ?? String(node.running ?? 0), x, y - (waiting && r > 24 ? r * 0.12 : 0));
    if (waiting && r > 24) {
      context.font = `600 ${Math.min(14, r * 0.34)}px system-ui, sans-serif`;
      context.fillText(waiting, x, y + r * 0.45);
    }
  }

  drawName(context, c, node, place, boxed) {
    if (!node) return;
    context.textAlign = "center"; context.textBaseline = "middle";
    context.font = `${node.isSelf ? 650 : 500} 12.5px system-ui, sans-serif`;
    const y = place.y + place.r + (boxed ? 13 : 19);
    if (boxed) {
      const width = context.measureText(node.name).width + 14;
      const x = Math.max(2, Math.min(this.width - width - 2, place.x - width / 2));
      context.fillStyle = c.card; context.strokeStyle = c.line; context.lineWidth = 1;
      context.beginPath(); context.roundRect(x, y - 10, width, 20, 6); context.fill(); context.stroke();
      context.fillStyle = c.ink;
      context.fillText(node.name, x + width / 2, y);
      return;
    }
    this.text(context, shortened(context, node.name, 150), place.x, y, c.ink, c.card);
    const under = node.state === "alive" ? (node.ttft_p50_ms ? `first token ${time(node.ttft_p50_ms)}` : "") : node.state;
    const tones = { dead: c.red, suspect: c.amber, draining: c.amber, loading: c.sky };
    context.font = "11.5px system-ui, sans-serif";
    this.text(context, under, place.x, y + 15, tones[node.state] ?? c.dim, c.card);
  }

  text(context, text, x, y, ink, halo, width = 4) {
    context.lineJoin = "round";
    context.lineWidth = width;
    context.strokeStyle = halo;
    context.strokeText(text, x, y);
    context.fillStyle = ink;
    context.fillText(text, x, y);
  }

  arc(context, colour, x, y, r, from, length) {
    context.strokeStyle = colour;
    context.beginPath(); context.arc(x, y, r, from, from + Math.min(length, 2 * Math.PI)); context.stroke();
  }

  leaf(context, c, x, y, size) {
    context.strokeStyle = context.fillStyle = c.leaf;
    context.lineWidth = 2.4 * size;
    context.beginPath(); context.moveTo(x, y + 2); context.quadraticCurveTo(x, y - 8 * size, x + 6 * size, y - 12 * size); context.stroke();
    context.beginPath(); context.moveTo(x, y - 2 * size);
    context.quadraticCurveTo(x - 6 * size, y - 16 * size, x - 20 * size, y - 12 * size);
    context.quadraticCurveTo(x - 14 * size, y + 1 * size, x, y - 2 * size);
    context.fill();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let best = "", least = Infinity;
    for (const [name, place] of this.places) {
      const away = Math.hypot(place.x - x, place.y - y) - place.r;
      if (away < 8 && away < least) { best = name; least = away; }
    }
    return best;
  }

  point(event) { this.touch(this.at(event)); }

  touch(name) {
    if (name === this.hover) return;
    this.hover = name;
    this.canvas.style.cursor = name ? "pointer" : "default";
    this.renew();
  }

  key(event) {
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Home") this.chosen(this.cluster.self, true);
    else if (ways[event.key]) this.walk(...ways[event.key]);
    else return;
    event.preventDefault();
  }

  /** To the node that lies best in this direction. */
  walk(dx, dy) {
    const from = this.places.get(this.choice);
    if (!from) { this.chosen(this.cluster.self, true); return; }
    let best = "", least = Infinity;
    for (const [name, place] of this.places) {
      const x = place.gx - from.gx, y = place.gy - from.gy;
      const along = x * dx + y * dy;
      const cost = Math.hypot(x, y) + 2.5 * Math.abs(x * dy - y * dx);
      if (name !== this.choice && along > 1 && cost < least) { best = name; least = cost; }
    }
    if (best) this.chosen(best, true);
  }
}

/** The `n` points of a hexagonal lattice that lie closest to the middle of an ellipse with half axes a and b. */
function packed(n, a, b) {
  const gap = Math.sqrt((2 * Math.PI * a * b) / (Math.sqrt(3) * n)) * 0.97;
  const rows = Math.ceil((b * 1.5) / (gap * 0.866)), columns = Math.ceil((a * 1.5) / gap);
  const points = [];
  for (let row = -rows; row <= rows; row += 1) {
    for (let column = -columns; column <= columns; column += 1) {
      const x = (column + (row % 2 ? 0.5 : 0)) * gap, y = row * gap * 0.866;
      points.push([x, y, (x / a) ** 2 + (y / b) ** 2]);
    }
  }
  return points.sort((p, q) => p[2] - q[2]).slice(0, n);
}

function shortened(context, text, most) {
  if (context.measureText(text).width <= most) return text;
  let kept = text;
  while (kept.length > 3 && context.measureText(`${kept}…`).width > most) kept = kept.slice(0, -1);
  return `${kept}…`;
}
