// The events of the node: connects, and connects again for as long as the page is open.

const SILENT_MS = 8000;
const AGAIN_MS = 1000;
const AGAIN_MOST_MS = 8000;

export class Feed {
  /** `told(kind, message)` gets "first" and "tick"; `state(word)` gets "connecting", "live" or "lost". */
  constructor(url, told, state) {
    this.url = url;
    this.told = told;
    this.state = state;
    this.pause = AGAIN_MS;
    this.heard = 0;
    this.pace = 1000;
    this.open();
    // A connection can die without a word (a laptop that slept): silence counts as loss.
    setInterval(() => {
      if (this.source && performance.now() - this.heard > Math.max(SILENT_MS, 5 * this.pace)) this.lose();
    }, 1000);
    addEventListener("pagehide", () => this.close());
    addEventListener("pageshow", (event) => { if (event.persisted) this.open(); });
  }

  open() {
    this.close();
    this.heard = performance.now();
    const source = new EventSource(this.url);
    this.source = source;
    source.addEventListener("first", (event) => this.take("first", event));
    source.addEventListener("tick", (event) => this.take("tick", event));
    source.onerror = () => { if (this.source === source) this.lose(); };
  }

  close() {
    clearTimeout(this.timer);
    if (this.source) this.source.close();
    this.source = null;
  }

  take(kind, event) {
    const now = performance.now();
    if (kind === "tick") this.pace = now - this.heard;
    this.heard = now;
    this.pause = AGAIN_MS;
    this.told(kind, JSON.parse(event.data));
    this.state("live");
  }

  lose() {
    this.close();
    this.state("lost");
    this.timer = setTimeout(() => this.open(), this.pause * (0.75 + Math.random() / 2));
    this.pause = Math.min(this.pause * 1.6, AGAIN_MOST_MS);
  }
}
