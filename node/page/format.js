// Numbers for people, and elements from text. Nothing here parses markup: what the cluster says stays text.

export const NONE = "–";

export function count(value) {
  if (value == null || Number.isNaN(value)) return NONE;
  if (value >= 1e6) return `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
  return value >= 10 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

/** Milliseconds; 0 is "not measured" in a load vector. */
export function time(ms) {
  if (!ms) return NONE;
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  return ms < 1e5 ? `${(ms / 1000).toFixed(ms < 1e4 ? 2 : 1)} s` : `${(ms / 1000).toFixed(0)} s`;
}

export function age(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

export function share(value) {
  return value == null || Number.isNaN(value) ? NONE : `${Math.round(value * 100)} %`;
}

export function bytes(value) {
  if (!value) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (value >= 1024 && index < units.length - 1) { value /= 1024; index += 1; }
  return `${value.toFixed(value < 10 && index ? 1 : 0)} ${units[index]}`;
}

export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Write only what changed: a text node that is written anew is laid out anew. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let palette = null;
addEventListener("colours", () => { palette = null; });

/** The colours of the style sheet, for canvases. */
export function colours() {
  if (!palette) {
    const style = getComputedStyle(document.documentElement);
    const names = ["back", "card", "ink", "dim", "line", "grape", "leaf", "sky", "amber", "red", "vine", "rind"];
    palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return palette;
}

/** A context of a canvas that fits its box at the screen's own resolution; null while it has no size. */
export function paper(canvas) {
  const ratio = Math.min(devicePixelRatio || 1, 2);
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return null;
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
