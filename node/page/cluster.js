// What the page knows: nodes with a short past each, edges, flows since the last tick, requests, the node's own steps.

const PAST = 240;
const MAX_REQUESTS = 100;

const pair = (a, b) => `${a}\u0000${b}`;

export class Cluster {
  constructor() {
    this.nodes = new Map();
    this.requests = [];
    this.steps = new Map();
    this.past = { columns: [], step_s: 2, points: 450 };
    this.self = "";
    this.flows = [];
    this.edges = [];
    this.counted = null;
  }

  first(message) {
    Object.assign(this, { self: message.self, cluster: message.cluster, build: message.build, past: message.past });
    this.steps.clear();
    this.requests = [];
    this.counted = null; // counters may have begun anew: the first ones are no flow
    this.apply(message);
  }

  apply(message) {
    this.now = message.now;
    this.heard = performance.now();
    this.engine = message.engine;
    this.kv = message.kv;
    this.hidden = message.hidden;
    const names = message.nodes.name;
    this.takeNodes(message.nodes, message.models);
    this.edges = message.edges.map(([a, b, ms]) => ({ a: names[a], b: names[b], ms }));
    this.rates = message.rates.map(([a, b, rate]) => ({ from: names[a], to: names[b], rate }));
    this.takeFlows(message, names);
    this.takeRequests(message.requests);
    for (const step of message.steps) this.steps.set(step[0], step);
    const oldest = this.now - this.past.points - 1;
    for (const index of this.steps.keys()) if (index < oldest) this.steps.delete(index);
  }

  takeNodes(columns, models) {
    const keys = Object.keys(columns);
    const seen = new Set(columns.name);
    for (const name of this.nodes.keys()) if (!seen.has(name)) this.nodes.delete(name);
    columns.name.forEach((name, index) => {
      const node = this.nodes.get(name) ?? { past: [] };
      for (const key of keys) node[key] = columns[key][index];
      node.models = node.models.map((place) => models[place]);
      node.isSelf = name === this.self;
      node.past.push({ running: node.running ?? 0, waiting: node.waiting ?? 0, kv: node.kv_use ?? 0 });
      if (node.past.length > PAST) node.past.shift();
      this.nodes.set(name, node);
    });
  }

  /** Flows are what counters rose by. Transfers between others show as a rate that its puller measured anew. */
  takeFlows(message, names) {
    const next = new Map();
    const note = (kind, triples) => {
      for (const [a, b, value] of triples) next.set(`${kind}${pair(names[a], names[b])}`, [kind, names[a], names[b], value]);
    };
    note("forward", message.forwards);
    note("pull", message.pulls);
    note("rate", message.rates);
    const flows = new Map();
    if (this.counted) {
      for (const [key, [kind, from, to, value]] of next) {
        const old = this.counted.get(key)?.[3] ?? 0;
        if (kind === "rate" ? value !== old && value : value > old) {
          const what = kind === "forward" ? "forward" : "pull";
          const id = what + pair(from, to);
          if (!flows.has(id)) flows.set(id, { kind: what, from, to, count: kind === "rate" ? 1 : value - old });
        }
      }
    }
    this.counted = next;
    this.flows = [...flows.values()];
  }

  takeRequests(rows) {
    const fresh = new Map(rows.map((row) => [row.seq, row]));
    for (const row of rows) row.at = performance.now() - row.ago_s * 1000;
    const kept = this.requests.filter((row) => !fresh.has(row.seq));
    this.requests = [...rows, ...kept].sort((a, b) => b.seq - a.seq).slice(0, MAX_REQUESTS);
  }

  /** Steps of the last `seconds`, one for each step of time, gaps filled with null; oldest first. */
  span(seconds) {
    const last = Math.floor(this.now ?? 0);
    const length = Math.min(Math.round(seconds / this.past.step_s), this.past.points);
    return Array.from({ length }, (_, index) => this.steps.get(last - length + 1 + index) ?? null);
  }

  /** Most requests that any node had lately: a full ring of the map. */
  peak() {
    let most = 8;
    for (const node of this.nodes.values()) {
      for (const moment of node.past) most = Math.max(most, moment.running + moment.waiting);
    }
    return most;
  }

  column(name) { return this.past.columns.indexOf(name); }

  /** Totals of the last `seconds` at this node. */
  totals(seconds) {
    const sum = {};
    for (const name of this.past.columns) sum[name] = 0;
    for (const step of this.span(seconds)) {
      if (step) this.past.columns.forEach((name, index) => { sum[name] += step[index]; });
    }
    return sum;
  }

  neighbours(name) {
    return this.edges
      .filter((edge) => edge.a === name || edge.b === name)
      .map((edge) => ({ name: edge.a === name ? edge.b : edge.a, ms: edge.ms }))
      .sort((x, y) => x.ms - y.ms);
  }
}
