// One node as a grape. `place` has its middle (x, y) and radius (r); `c` are the colours.

import { time } from "./format.js";

const GLYPHS = { dead: "×", left: "·", suspect: "?", loading: "…", draining: "↓" };
const FULL = 2 * Math.PI;

/** `peak` requests are a full ring; `halo` is the strength of the mark around a node that is chosen. */
export function drawGrape(context, c, node, place, peak, halo) {
  if (!node) return;
  const { x, y, r } = place;
  const gone = node.state === "dead" || node.state === "left";
  const width = Math.max(2, Math.min(6, r * 0.13));
  context.globalAlpha = 1;
  disc(context, c.card, x, y, r + 5);
  context.globalAlpha = gone ? 0.5 : 1;
  disc(context, c.rind, x, y, r);
  if (!gone) {
    level(context, c, node.kv_use ?? 0, x, y, r);
    light(context, x, y, r);
  }
  rim(context, c, node.state, x, y, r, width);
  if (!gone) {
    const running = ((node.running ?? 0) / peak) * FULL, waiting = ((node.waiting ?? 0) / peak) * FULL;
    context.lineWidth = width;
    arc(context, c.leaf, x, y, r + width / 2, -Math.PI / 2, running);
    arc(context, c.amber, x, y, r + width / 2, -Math.PI / 2 + running, waiting);
  }
  if (halo) {
    context.lineWidth = 2;
    context.globalAlpha = halo;
    arc(context, c.grape, x, y, r + width + 4, 0, FULL);
  }
  context.globalAlpha = 1;
  if (node.isSelf) leaf(context, c, x, y - r - width - 1, Math.max(0.55, r / 44));
  inside(context, c, node, x, y, r);
}

/** Below this radius there is room for a name and no more. */
export const ROOMY = 28;

/** The name below a node, and what is to be said of it. */
export function drawName(context, c, node, place) {
  if (!node) return;
  const y = place.y + place.r + 19;
  middle(context, node.isSelf ? 650 : 500, 12.5);
  outlined(context, shortened(context, node.name, place.gr < ROOMY ? 84 : 150), place.x, y, c.ink, c.card);
  const under = node.state === "alive" ? (node.ttft_p50_ms && place.gr >= ROOMY ? `first token ${time(node.ttft_p50_ms)}` : "") : node.state;
  const tones = { dead: c.red, suspect: c.amber, draining: c.amber, loading: c.sky };
  middle(context, 400, 11.5);
  outlined(context, under, place.x, y + 15, tones[node.state] ?? c.dim, c.card);
}

/** The name of a node of a bunch, in a box that stays on the map. */
export function drawTag(context, c, node, place, most) {
  if (!node) return;
  middle(context, node.isSelf ? 650 : 500, 12.5);
  const width = context.measureText(node.name).width + 14;
  const x = Math.max(2, Math.min(most - width - 2, place.x - width / 2)), y = place.y + place.r + 13;
  context.fillStyle = c.card; context.strokeStyle = c.line; context.lineWidth = 1;
  context.beginPath(); context.roundRect(x, y - 10, width, 20, 6); context.fill(); context.stroke();
  context.fillStyle = c.ink;
  context.fillText(node.name, x + width / 2, y);
}

/** Text that can be read on a line. */
export function outlined(context, text, x, y, ink, halo) {
  context.lineJoin = "round";
  context.lineWidth = 4;
  context.strokeStyle = halo;
  context.strokeText(text, x, y);
  context.fillStyle = ink;
  context.fillText(text, x, y);
}

function inside(context, c, node, x, y, r) {
  if (r < 7) return;
  const glyph = GLYPHS[node.state];
  const waiting = node.waiting && r > 24 ? `+${node.waiting}` : "";
  // The colour of text reads well on both, above the level and below it.
  context.fillStyle = glyph || node.running || node.waiting ? c.ink : c.dim;
  middle(context, 650, Math.max(9, Math.min(26, r * 0.62)));
  context.fillText(glyph ?? String(node.running ?? 0), x, y - (waiting ? r * 0.12 : 0));
  if (!waiting) return;
  middle(context, 600, Math.min(14, r * 0.34));
  context.fillText(waiting, x, y + r * 0.45);
}

function level(context, c, use, x, y, r) {
  if (!use) return;
  const height = Math.max(use, 1.5 / r);
  const angle = Math.asin(Math.max(-1, Math.min(1, 1 - 2 * height)));
  context.fillStyle = c.grape;
  context.globalAlpha = 0.72;
  context.beginPath(); context.arc(x, y, r, angle, Math.PI - angle); context.fill();
  context.globalAlpha = 1;
}

function light(context, x, y, r) {
  if (r <= 9) return;
  context.globalAlpha = 0.16;
  context.fillStyle = "#fff";
  context.beginPath(); context.ellipse(x - r * 0.36, y - r * 0.42, r * 0.3, r * 0.2, -0.7, 0, 7); context.fill();
  context.globalAlpha = 1;
}

function rim(context, c, state, x, y, r, width) {
  const tones = { alive: c.vine, loading: c.sky, draining: c.amber, suspect: c.amber, dead: c.red, left: c.dim };
  context.lineWidth = state === "alive" ? Math.max(1, width / 2) : Math.max(1.5, width * 0.7);
  context.setLineDash(state === "loading" || state === "left" ? [3, 5] : []);
  arc(context, tones[state] ?? c.vine, x, y, r, 0, FULL);
  context.setLineDash([]);
}

function leaf(context, c, x, y, size) {
  context.strokeStyle = context.fillStyle = c.leaf;
  context.lineWidth = 2.4 * size;
  context.beginPath(); context.moveTo(x, y + 2);
  context.quadraticCurveTo(x, y - 8 * size, x + 6 * size, y - 12 * size); context.stroke();
  context.beginPath(); context.moveTo(x, y - 2 * size);
  context.quadraticCurveTo(x - 6 * size, y - 16 * size, x - 20 * size, y - 12 * size);
  context.quadraticCurveTo(x - 14 * size, y + size, x, y - 2 * size);
  context.fill();
}

function disc(context, colour, x, y, r) {
  context.fillStyle = colour;
  context.beginPath(); context.arc(x, y, r, 0, 7); context.fill();
}

function arc(context, colour, x, y, r, from, length) {
  if (!length) return;
  context.strokeStyle = colour;
  context.beginPath(); context.arc(x, y, r, from, from + Math.min(length, FULL)); context.stroke();
}

function middle(context, weight, size) {
  context.textAlign = "center"; context.textBaseline = "middle";
  context.font = `${weight} ${size}px system-ui, sans-serif`;
}

function shortened(context, text, most) {
  if (context.measureText(text).width <= most) return text;
  let kept = text;
  while (kept.length > 3 && context.measureText(`${kept}…`).width > most) kept = kept.slice(0, -1);
  return `${kept}…`;
}
