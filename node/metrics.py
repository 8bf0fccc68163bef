"""What the node counts, for Prometheus and for its page. Names begin with ``grapevine_`` and end with their unit.

Each node has a registry of its own, so that several nodes can live in one process (tests, simulations).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmigrate.pull_types import Reason
from kvmigrate.ways import FromFile, OverTcp
from node.decisions import DecisionLog
from node.history import History
from node.hits import HitWatch
from node.plan import Plan, Refusal
from node.relay.call import Call
from node.relay.carry.lost import CAUSES, Lost
from node.tally import Spread, Tally

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_DECIDE_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1)

_STATUSES = {int(status): str(int(status)) for status in HTTPStatus}

#: The words of each label. All are there from the start, at nought: who watches a rate would miss the first event of a
#: counter that begins with it.
RETRIES = ("busy", "longer", "refused", "failed")
DENIALS = ("line", "waited", "displaced", "deadline")
BREAKS = ("client", "target")
RESULTS = ("carried", "failed")
REMOTE_ERRORS = ("signature", "plan", "body", "gist", "chunks", "meta", "row", "model", "offer")
ADMIN = ("done", "refused")
#: Of answers there may be any status; these are usual.
ANSWERS = (("local", "200"), ("forwarded", "200"), ("refused", "429"), ("refused", "503"))

Sample = tuple[str, str, float]
"""Name without prefix, help text, value."""


_log = logging.getLogger("grapevine.kv")


class _Live(Collector):
    """Read at the moment of the scrape."""

    def __init__(self, gauges: Callable[[], Iterable[Sample]], totals: Callable[[], Iterable[Sample]]) -> None:
        self._gauges = gauges
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        for name, text, value in self._gauges():
            yield GaugeMetricFamily(f"grapevine_{name}", text, value=value)
        for name, text, value in self._totals():
            yield CounterMetricFamily(f"grapevine_{name}", text, value=value)


class Metrics:
    """Implements `node.relay.dispatch.Notes` and counts what the rest of the node reports."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.registry = CollectorRegistry()
        self.history = History(clock)
        self.log = DecisionLog()
        self.hits = HitWatch()
        r = self.registry
        self.requests = Tally("grapevine_requests", "Requests answered to clients.", ("place", "status"), ANSWERS)
        self.first_byte = Spread(
            "grapevine_first_byte_seconds",
            "From a request's arrival to the first byte of its answer.",
            _SECONDS,
            ("place",),
        )
        self.decide = Spread("grapevine_decide_seconds", "Time taken to decide.", _DECIDE_SECONDS)
        self.served = Tally("grapevine_peer_requests", "Requests of peers, by answer.", ("status",), (("200",),))
        for often in (self.requests, self.first_byte, self.decide, self.served):
            r.register(often)
        self.retries = Counter("grapevine_retries", "Attempts that ended without an answer.", ("why",), registry=r)
        self.wait = Histogram("grapevine_wait_seconds", "Time in the waiting room.", buckets=_SECONDS, registry=r)
        self.denials = Counter(
            "grapevine_denials",
            "Requests refused for want of a place (line: at once; waited, displaced: after standing in it) or of time.",
            ("why",),
            registry=r,
        )
        self.broken = Counter(
            "grapevine_broken_answers", "Answers that broke off after their first byte.", ("why",), registry=r
        )
        self.carries = Counter(
            "grapevine_carries",
            "Streams that lost what ran them, by how and what came of it.",
            ("cause", "result"),
            registry=r,
        )
        self.carry_pause = Histogram(
            "grapevine_carry_pause_seconds",
            "From the last piece before a stream was lost to the first one after it was carried.",
            ("cause",),
            buckets=_SECONDS,
            registry=r,
        )
        self.gathers = Counter(
            "grapevine_gathered_answers",
            "Answers in one piece that were asked of the engine as streams, by what came of it.",
            ("result",),
            registry=r,
        )
        self.predicted = Counter(
            "grapevine_predicted_cached_tokens", "Prompt tokens expected in the cache.", registry=r
        )
        self.actual = Counter(
            "grapevine_actual_cached_tokens", "Prompt tokens the engine found in its cache.", registry=r
        )
        self.silent = Gauge(
            "grapevine_silent_zero_hits", "1 while the engine finds nothing cached where much was promised.", registry=r
        )
        self.prompt = Counter("grapevine_prompt_tokens", "Prompt tokens the engine started.", registry=r)
        self.pulls = Counter("grapevine_pulls", "Pulls of KV blocks from peers.", ("reason",), registry=r)
        self.pulled_blocks = Counter("grapevine_pulled_blocks", "KV blocks pulled.", registry=r)
        self.pulled_bytes = Counter("grapevine_pulled_bytes", "Bytes of KV pulled.", registry=r)
        self.pulled_by_way = Counter(
            "grapevine_pulled_way_bytes", "Bytes of KV pulled, over tcp or on the same host.", ("way",), registry=r
        )
        self.taken_over = Counter(
            "grapevine_taken_over_blocks",
            "KV blocks that a source was asked for after another one had not brought them in time.",
            registry=r,
        )
        self.warmed = Counter("grapevine_warmed_blocks", "KV blocks copied to warm this node.", registry=r)
        self.rescued = Counter(
            "grapevine_rescued_blocks", "KV blocks that peers took over while this node was drained.", registry=r
        )
        self.taken = Counter("grapevine_taken_blocks", "KV blocks taken over from nodes that were drained.", registry=r)
        self.restored = Counter(
            "grapevine_restored_blocks", "KV blocks read back from the spill file at the start.", registry=r
        )
        self.pull_seconds = Histogram("grapevine_pull_seconds", "Time of one pull.", buckets=_SECONDS, registry=r)
        self.corrupt = Counter("grapevine_corrupt_blocks", "KV blocks that failed their check.", registry=r)
        self.remote_errors = Counter(
            "grapevine_remote_errors", "Messages of peers that made no sense.", ("what",), registry=r
        )
        self.admin = Counter(
            "grapevine_admin_calls", "Calls of /admin: done, or refused for the token.", ("result",), registry=r
        )
        self.members = Gauge("grapevine_members", "Members by state.", ("state",), registry=r)
        self._begin()

    def _begin(self) -> None:
        for counter, words in (
            (self.retries, RETRIES),
            (self.denials, DENIALS),
            (self.broken, BREAKS),
            (self.pulls, Reason),
            (self.pulled_by_way, (OverTcp.name, FromFile.name)),
            (self.remote_errors, REMOTE_ERRORS),
            (self.admin, ADMIN),
        ):
            for word in words:
                counter.labels(word)
        for cause in CAUSES:
            self.carry_pause.labels(cause)
            for result in RESULTS:
                self.carries.labels(cause, result)

    def watch(
        self, gauges: Callable[[], Iterable[Sample]], totals: Callable[[], Iterable[Sample]] = lambda: ()
    ) -> None:
        """Add gauges and counters that are read at each scrape."""
        self.registry.register(_Live(gauges, totals))

    def about(self, **labels: str) -> None:
        """Tell who this is: a gauge that is 1, to join others with."""
        info = Gauge("grapevine_build_info", "1; who this node is.", tuple(labels), registry=self.registry)
        info.labels(**labels).set(1)

    def page(self) -> bytes:
        """Return our metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def decided(self, call: Call, plan: Plan | Refusal, seconds: float) -> None:
        """Note a decision."""
        self.decide.add(seconds)

    def retried(self, why: str) -> None:
        """Note an attempt without an answer."""
        self.retries.labels(why).inc()

    def waited(self, call: Call, seconds: float) -> None:
        """Note a stay in the waiting room."""
        self.wait.observe(seconds)

    def denied(self, why: str) -> None:
        """Note a refusal for want of a place or of time."""
        self.denials.labels(why).inc()

    def answered(
        self,
        call: Call,
        plan: Plan | None,
        status: int,
        *,
        first_byte_s: float | None,
        told: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Note an answer or a refusal."""
        place = "refused" if plan is None else "forwarded" if plan.hops else "local"
        self.requests.add((place, status_label(status)))
        if first_byte_s is not None:
            self.first_byte.add(first_byte_s, (place,))
        self.history.answered(place, first_byte_s)
        self.log.note(call, plan, status, self._clock(), first_byte_s=first_byte_s, told=told)

    def carried(self, call: Call, lost: Lost, seconds: float, failed: str) -> None:
        """Note a stream that was carried to another node, or could not be."""
        self.carries.labels(lost.cause, "failed" if failed else "carried").inc()
        if not failed:
            self.carry_pause.labels(lost.cause).observe(seconds)

    def gathered(self, result: str) -> None:
        """Note an answer that was to be gathered."""
        self.gathers.labels(result).inc()

    def broke(self, call: Call, plan: Plan, why: str) -> None:
        """Note an answer that broke off."""
        self.broken.labels("client" if why == "client gone" else "target").inc()
        self.log.broke(call, why)

    def started(self, predicted: int, actual: int, prompt: int) -> None:
        """Note what the engine found cached of a request's prompt, against what was predicted (tokens)."""
        self.predicted.inc(predicted)
        self.actual.inc(actual)
        self.prompt.inc(prompt)
        self.history.started(prompt, actual)
        if self.hits.started(predicted, actual):
            self._say_hits()

    def pulled_way(self, way: str, size: int) -> None:
        """Note how bytes came; ``way`` is one of two fixed words, empty when nothing came."""
        if size:
            self.pulled_by_way.labels(way).inc(size)

    def _say_hits(self) -> None:
        self.silent.set(float(self.hits.alarm))
        if not self.hits.alarm:
            _log.info("the engine finds prompts in its cache again")
            return
        _log.warning(
            "the engine finds %.0f %% of the prompt tokens that should be in its cache: is prefix caching off, or does "
            "it render prompts otherwise than they are sent? Routing by prefix gains nothing until then.",
            100 * self.hits.share,
        )

    def pulled(self, reason: str, blocks: int, size: int, seconds: float, corrupt: int) -> None:
        """Note a pull; ``reason`` is one of the puller's fixed words."""
        self.pulls.labels(reason).inc()
        self.pulled_blocks.inc(blocks)
        self.pulled_bytes.inc(size)
        self.pull_seconds.observe(seconds)
        self.corrupt.inc(corrupt)
        self.history.pulled(blocks)


def status_label(status: int) -> str:
    """Return a status as a label: an engine that answers with any number must not fill our table."""
    return _STATUSES.get(status, "other")
