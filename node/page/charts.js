// Time series of this node: four small charts on canvases, with the values beside them as text.

import { NONE, colours, count, make, paper, say, share, time } from "./format.js";

const PAD = { left: 4, right: 4, top: 6, bottom: 16 };
const LABEL_EVERY_MS = 5000;

/** What is drawn. `value(step, chart)` gives a number, or null where nothing was measured. */
function specs(cluster) {
  const at = (name) => (step) => step[cluster.column(name)];
  const rate = (name) => (step) => at(name)(step) / cluster.past.step_s;
  const measured = (name) => (step) => at(name)(step) || null;
  const pulled = (step) => {
    const cached = at("cached_tokens")(step);
    return Math.min(cached, at("pulled_blocks")(step) * (cluster.kv?.block_tokens || 0));
  };
  const perSecond = (value) => (step) => value(step) / cluster.past.step_s;
  return [
    { title: "Requests per second", kind: "bars", format: count, series: [
      { name: "here", tone: "leaf", value: rate("local") },
      { name: "forwarded", tone: "sky", value: rate("forwarded") },
      { name: "refused", tone: "red", value: rate("refused") },
    ] },
    { title: "Time to first byte", kind: "lines", format: time, series: [
      { name: "median", tone: "grape", value: measured("ttft_p50_ms") },
      { name: "p95", tone: "amber", value: measured("ttft_p95_ms") },
    ] },
    { title: "Prompt tokens found in cache", kind: "lines", format: share, most: 1, series: [
      { name: "hit ratio", tone: "leaf", over: 15, top: at("cached_tokens"), bottom: at("prompt_tokens") },
    ] },
    { title: "Prompt tokens per second", kind: "bars", format: count, series: [
      { name: "here", tone: "leaf", value: perSecond((step) => at("cached_tokens")(step) - pulled(step)) },
      { name: "pulled", tone: "grape", value: perSecond(pulled) },
      { name: "computed", tone: "amber", value: perSecond((step) => at("prompt_tokens")(step) - at("cached_tokens")(step)) },
    ] },
  ];
}

export class Charts {
  constructor(box, cluster) {
    this.cluster = cluster;
    this.seconds = 300;
    this.charts = specs(cluster).map((spec) => new Chart(spec, cluster));
    box.append(...this.charts.map((chart) => chart.element));
    addEventListener("colours", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(box);
  }

  span(seconds) {
    this.seconds = seconds;
    this.draw();
  }

  draw() { for (const chart of this.charts) chart.draw(this.seconds); }
}

class Chart {
  constructor(spec, cluster) {
    Object.assign(this, spec, { cluster, cursor: null, said: 0 });
    this.values = spec.series.map(() => make("b", {}, NONE));
    const legend = make("ul", { class: "legend" }, ...spec.series.map((one, index) =>
      make("li", {}, make("i", { class: `c-${one.tone}` }), `${one.name} `, this.values[index])));
    this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": spec.title });
    this.when = make("span", { class: "dim" });
    const title = make("div", { class: "row" }, make("h3", {}, spec.title), this.when);
    this.element = make("article", { class: "card chart" }, title, legend, this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX / this.canvas.clientWidth));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
      if (!way) return;
      event.preventDefault();
      this.point(Math.max(0, Math.min(1, (this.cursor ?? 1) + way)));
    });
  }

  point(place) {
    this.cursor = place;
    this.draw(this.seconds ?? 300);
  }

  draw(seconds) {
    this.seconds = seconds;
    const steps = this.cluster.span(seconds);
    const sheet = paper(this.canvas);
    if (!sheet || !steps.length) return;
    const group = this.kind === "bars" ? Math.max(1, Math.ceil((steps.length * 3) / sheet.width)) : 1;
    const rows = this.series.map((one) => merged(one, steps, group, this.kind === "bars"));
    const length = rows[0].length;
    const box = { x: PAD.left, y: PAD.top, w: sheet.width - PAD.left - PAD.right, h: sheet.height - PAD.top - PAD.bottom };
    const sums = Array.from({ length }, (_, i) => (this.kind === "bars" ? sum(rows, i) : Math.max(...rows.map((row) => row[i] ?? 0))));
    const most = this.most ?? nice(Math.max(...sums, 0));
    const c = colours();
    this.axes(sheet.context, box, most, seconds, c);
    if (this.kind === "bars") this.bars(sheet.context, box, rows, most, c);
    else this.lines(sheet.context, box, rows, most, c);
    this.tell(sheet.context, box, rows, seconds, c);
  }

  axes(context, box, most, seconds, c) {
    context.strokeStyle = c.line;
    context.lineWidth = 1;
    context.beginPath();
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(box.y + box.h * (1 - share)) + 0.5;
      context.moveTo(box.x, y); context.lineTo(box.x + box.w, y);
    }
    context.stroke();
    context.fillStyle = c.dim;
    context.font = "10.5px system-ui, sans-serif";
    context.textBaseline = "top"; context.textAlign = "left";
    if (most > 0) context.fillText(this.format(most), box.x + 2, box.y + 3);
    context.fillText(`${seconds / 60} min ago`, box.x, box.y + box.h + 4);
    context.textAlign = "right";
    context.fillText("now", box.x + box.w, box.y + box.h + 4);
  }

  bars(context, box, rows, most, c) {
    if (!most) return;
    const width = box.w / rows[0].length;
    rows[0].forEach((_, index) => {
      let y = box.y + box.h;
      rows.forEach((row, place) => {
        const height = ((row[index] ?? 0) / most) * box.h;
        if (height <= 0) return;
        context.fillStyle = c[this.series[place].tone];
        context.fillRect(box.x + index * width, y - height, Math.max(1, width - (width > 3 ? 1 : 0)), height);
        y -= height;
      });
    });
  }

  lines(context, box, rows, most, c) {
    if (!most) return;
    rows.forEach((row, place) => {
      context.strokeStyle = context.fillStyle = c[this.series[place].tone];
      context.lineWidth = 1.8;
      context.lineJoin = "round";
      const spot = (index) => [box.x + ((index + 0.5) / row.length) * box.w, box.y + box.h * (1 - Math.min(1, row[index] / most))];
      let last = -Infinity;
      context.beginPath();
      row.forEach((value, index) => {
        if (value == null) return;
        if (index - last > 10) context.moveTo(...spot(index)); else context.lineTo(...spot(index));
        last = index;
      });
      context.stroke();
      row.forEach((value, index) => {
        if (value == null || (row[index - 1] != null && row[index + 1] != null)) return;
        context.beginPath(); context.arc(...spot(index), 2, 0, 7); context.fill();
      });
    });
  }

  /** The values at the cursor, or the latest, as text beside the chart and for those who cannot see it. */
  tell(context, box, rows, seconds, c) {
    const length = rows[0].length;
    let index = null;
    if (this.cursor != null) {
      index = Math.min(length - 1, Math.floor(this.cursor * length));
      const x = Math.round(box.x + ((index + 0.5) / length) * box.w) + 0.5;
      context.strokeStyle = c.dim;
      context.lineWidth = 1;
      context.beginPath(); context.moveTo(x, box.y); context.lineTo(x, box.y + box.h); context.stroke();
    }
    const texts = rows.map((row) => this.format(index == null ? latest(row, this.kind === "bars") : row[index]));
    texts.forEach((text, place) => say(this.values[place], text));
    const ago = index == null ? 0 : Math.round(((length - 1 - index) / length) * seconds);
    say(this.when, index == null ? "" : ago < 90 ? `${ago} s ago` : `${(ago / 60).toFixed(1)} min ago`);
    const now = performance.now();
    if (index != null || now - this.said > LABEL_EVERY_MS) {
      this.said = now;
      const told = this.series.map((one, place) => `${one.name} ${texts[place]}`).join(", ");
      this.canvas.setAttribute("aria-label", `${this.title}, ${index == null ? "now" : `${ago} seconds ago`}: ${told}`);
    }
  }
}

/** One value for each group of steps: a ratio over the steps before, a mean for bars, else as it is. */
function merged(one, steps, group, bars) {
  if (one.over) return ratio(one, steps);
  const values = steps.map((step) => (step ? one.value(step) : null));
  if (group === 1) return values;
  const rows = [];
  for (let i = values.length % group; i < values.length; i += group) {
    const part = values.slice(i, i + group);
    rows.push(bars ? part.reduce((total, value) => total + (value ?? 0), 0) / group : part.find((value) => value != null) ?? null);
  }
  return rows;
}

function ratio(one, steps) {
  return steps.map((_, index) => {
    let top = 0, bottom = 0;
    for (const step of steps.slice(Math.max(0, index - one.over + 1), index + 1)) {
      if (step) { top += one.top(step); bottom += one.bottom(step); }
    }
    return bottom ? top / bottom : null;
  });
}

function latest(row, bars) {
  if (bars) return row.slice(-5).reduce((total, value) => total + (value ?? 0), 0) / Math.min(5, row.length);
  for (let i = row.length - 1; i >= 0; i -= 1) if (row[i] != null) return row[i];
  return null;
}

const sum = (rows, index) => rows.reduce((total, row) => total + (row[index] ?? 0), 0);

/** The next round number. */
function nice(value) {
  if (value <= 0) return 0;
  const base = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * base).find((step) => step >= value * 1.02) ?? 10 * base;
}
