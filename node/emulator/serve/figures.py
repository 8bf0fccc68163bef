"""`/metrics` under vLLM's names, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left

from node.emulator.engine import EmulatedEngine

#: vLLM's buckets (v1/metrics/loggers.py), seconds.
TTFT_S = (
    *(.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)  # fmt: skip
GAP_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
WHOLE_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip


class Histogram:
    """Counts by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        """As text."""
        total, lines = 0, [f"# TYPE {name} histogram"]
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*lines, f"{name}_sum{{{labels}}} {self._sum}", f"{name}_count{{{labels}}} {total}"]


class Figures:
    """What is counted beside the engine, and the page."""

    def __init__(self, engine: EmulatedEngine, model: str) -> None:
        self._engine = engine
        self._labels = f'engine="0",model_name="{model}"'
        self.ttft = Histogram(TTFT_S)
        self.gap = Histogram(GAP_S)
        self.whole = Histogram(WHOLE_S)
        self.aborted = 0
        self.finished = {"stop": 0, "length": 0}

    def page(self) -> str:
        """The whole text."""
        engine, counts = self._engine, self._engine.counts
        lines: list[str] = []
        for kind, name, value in (
            ("gauge", "num_requests_running", engine.running),
            ("gauge", "num_requests_waiting", engine.waiting),
            ("gauge", "kv_cache_usage_perc", engine.cache.use),
            ("counter", "prefix_cache_queries_total", counts.queried),
            ("counter", "prefix_cache_hits_total", counts.hit),
            ("counter", "external_prefix_cache_queries_total", counts.queried - counts.hit),
            ("counter", "external_prefix_cache_hits_total", counts.external_hit),
            ("counter", "num_preemptions_total", counts.preemptions),
            ("counter", "prompt_tokens_total", counts.prompt),
            ("counter", "generation_tokens_total", counts.generated),
        ):
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{self._labels}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason, count in (*self.finished.items(), ("abort", self.aborted)):
            lines.append(f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {float(count)}')
        for name, histogram in (
            ("vllm:time_to_first_token_seconds", self.ttft),
            ("vllm:inter_token_latency_seconds", self.gap),
            ("vllm:e2e_request_latency_seconds", self.whole),
        ):
            lines += histogram.lines(name, self._labels)
        size, blocks = self._engine.config.block_size, self._engine.config.blocks
        lines += [
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{engine="0",block_size="{size}",num_gpu_blocks="{blocks}"}} 1.0',
        ]
        return "\n".join(lines) + "\n"
