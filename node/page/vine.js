// The map: nodes as grapes on a canvas. Ring: requests; level: KV cache; dots and squares on the tendrils: what flows.
// It draws when something changed, and frame by frame only while something moves. Edges and nodes lie on layers of their
// own, so that a frame in which only dots fly costs two copies.

import { colours, paper, time } from "./format.js";
import { ROOMY, drawGrape, drawName, drawTag, outlined } from "./grape.js";
import { seats } from "./seats.js";

const MOST_DOTS = 240;
const FLIGHT_MS = { forward: 900, pull: 1300 };
const GLOW_MS = 3500;
const LABELLED_EDGES = 12;
const NEAR_EDGES = 6; // drawn of the chosen node of a bunch
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Vine {
  /** `chosen(name)` is called when somebody chooses a node. */
  constructor(canvas, cluster, chosen) {
    Object.assign(this, { canvas, cluster, chosen, choice: "", hover: "", frame: 0 });
    this.slots = [];
    this.places = new Map();
    this.dots = [];
    this.peak = 8;
    this.round = true; // in a ring, else in a bunch
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
    if (gaps && (this.round || gaps > this.slots.length / 4)) this.slots = this.slots.filter(Boolean);
  }

  /** Send each node to where it belongs. */
  aim(width, height) {
    const { radius, points, round } = seats(this.slots.length, width, height);
    this.round = round;
    this.slots.forEach((name, index) => {
      if (!name) return;
      const [gx, gy] = points[index];
      const goal = { gx, gy, gr: radius };
      const place = this.places.get(name);
      if (place) Object.assign(place, goal);
      else this.places.set(name, { ...goal, x: gx, y: gy, r: still.matches ? radius : 2 });
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
    const { nodes, self } = this.cluster;
    const bunch = !this.round;
    for (const [name, place] of this.places) {
      const halo = name === this.choice ? 1 : name === this.hover ? 0.5 : 0;
      drawGrape(above, c, nodes.get(name), place, this.peak, halo);
      if (!bunch) drawName(above, c, nodes.get(name), place);
    }
    for (const name of bunch ? new Set([self, this.choice, this.hover]) : []) {
      if (this.places.has(name)) drawTag(above, c, nodes.get(name), this.places.get(name), this.width);
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
    const all = this.round;
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
      if (all && from.gr >= ROOMY && (near || this.cluster.edges.length <= LABELLED_EDGES)) labels.push([edge, from, to]);
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
      outlined(context, time(edge.ms), (from.x + 2 * cx + to.x) / 4, (from.y + 2 * cy + to.y) / 4, c.dim, c.card);
    }
  }

  drawGlows(context, c, now) {
    for (const [key, glow] of this.glows) {
      const from = this.places.get(glow.from), to = this.places.get(glow.to);
      if (now >= glow.until || !from || !to) { this.glows.delete(key); continue; }
      context.globalAlpha = 0.65 * ((glow.until - now) / GLOW_MS);
      context.strokeStyle = glow.kind === "pull" ? c.grape : c.sky;
      context.lineWidth = (glow.kind === "pull" ? 4 : 2.5) * (this.round ? 1 : 0.5);
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
