"""The node's own measurements, from what happens to the requests its engine has.

Promises
1. Events may be missing, late or come twice: a request is counted once, from `dispatched` to the first of
   `finished` and `failed`, and events of unknown requests change nothing but a counter.
2. Bounded: `MAX_REQUESTS` tracked at once, and what `node.learnt` keeps; a request whose end is never reported is
   given up after `FORGET_S`.
3. The engine's own report wins over counting for `REPORT_S`, corrected by what we sent it and what ended since: an
   engine that we are attached to may serve others too. Our connector pushes its reports. Other engines are asked
   (`node.onlooker`), and what they answer is as old as the question: an answer that a newer report overtook counts for
   nothing, and none is a sign of life, since a hung engine's HTTP server goes on answering.
4. What was learnt has a weight, that fades (`node.learnt`): a node that was slow once is not slow for ever.

A request: dispatched -> (started) -> (prefilled) -> (first byte) -> finished or failed. Engines without our
connector report only bytes: then the first byte stands for both started and prefilled.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from node.learnt import Learnt
from node.load import MAX_COUNT, MAX_TOKENS, LoadVector
from node.prefill import MIN_TOKENS, NO_WORK, PRIOR, Owed, PrefillTime, Work

#: Requests tracked at once; the oldest are given up beyond.
MAX_REQUESTS = 4096

#: Seconds after which a request without any event is taken for lost, and an engine's report for outdated.
FORGET_S = 3600.0
REPORT_S = 5.0

#: Requests that a report may claim to run, and as many to wait: with ours they still fit into a vector.
MAX_REPORTED = (MAX_COUNT - MAX_REQUESTS) // 2

#: Until something is measured.
PRIOR_DECODE_TPS = 40.0

#: Seconds for which quantiles and rates are good enough for a decision of our own: peers decide on older ones.
GLANCE_S = 0.1


@dataclass(slots=True)
class _Request:
    dispatched: float
    touched: float
    #: Requests dispatched up to it, itself included.
    number: int
    #: What is left to compute of its prompt, as far as known.
    work: Work
    #: A slot was free when it came: it did not wait, so its time to first token is prompts being computed.
    at_once: bool
    started: bool = False
    #: Its prompt counts as being computed.
    begun: bool = False
    prefilled: bool = False
    #: All that there was to compute of it, and whether that taught how long it takes.
    prompt: Work = NO_WORK
    timed: bool = False
    first_byte: float | None = None
    last_byte: float | None = None
    tokens: int = 0


@dataclass(slots=True)
class _Since:
    """Our own requests since a moment: a report of that moment knows nothing of it."""

    at: float
    #: Requests dispatched up to then.
    number: int
    #: Dispatched later and not over yet; dispatched before, and over.
    sent: int = 0
    ended: int = 0

    def end(self, request: _Request) -> None:
        if request.number > self.number:
            self.sent -= 1
        else:
            self.ended += 1


@dataclass(slots=True)
class _Report:
    running: int
    waiting: int
    kv_use: float
    since: _Since
    #: The engine was asked. It is asked again and again, so an old answer means nothing; our connector says nothing
    #: while nothing changes and during a long step, so its last word holds.
    asked: bool

    def fresh(self, now: float) -> bool:
        return now - self.since.at <= REPORT_S


@dataclass(slots=True)
class MeterCounts:
    """Totals since start, for metrics."""

    finished: int = 0
    failed: int = 0
    forgotten: int = 0
    #: Events that named no request we know.
    unknown: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    output_tokens: int = 0


class LoadMeter:
    """Fed with events, gives the load vector. `now` is monotonic seconds, never going back."""

    def __init__(self, *, slots: int = 0) -> None:
        #: Requests that the engine computes at once (vLLM: max_num_seqs); 0 = unknown.
        self.slots = slots
        self.counts = MeterCounts()
        #: Signs of life of the engine: see `LoadVector.moves`.
        self.moves = 0
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._learnt = Learnt()
        self._report: _Report | None = None
        #: Since the engine was last asked for a report, until it has answered.
        self._asked: _Since | None = None
        self._dispatched = 0
        #: The engine's connector has reported a start: then "not started" means waiting.
        self._sees_starts = False
        #: Prompts not computed yet: of all requests, and of those being computed since `_progress`.
        self._ahead = Owed()
        self._begun = Owed()
        self._progress = 0.0
        #: When the engine's connector last reported a prompt done.
        self._computed_at = -math.inf
        #: The part of a vector that rests on what was learnt, and when it was worked out.
        self._measured: tuple[float, PrefillTime, float, float, float, float, float, float, float]
        self._speeds: LoadVector
        self._measure(-math.inf)

    def dispatched(self, rid: str, now: float, est_tokens: int, cached_est: int = 0) -> None:
        """The engine got a request of about `est_tokens`, of which about `cached_est` are in its cache."""
        if rid in self._requests:
            return
        while len(self._requests) >= MAX_REQUESTS:
            self._leave(self._requests.popitem(last=False)[1])
            self.counts.forgotten += 1
        active = len(self._requests)
        self._dispatched += 1
        at_once = active < self.slots if self.slots else not active
        request = _Request(now, now, self._dispatched, work=NO_WORK, at_once=at_once)
        self._requests[rid] = request
        if self._report is not None:
            self._report.since.sent += 1
        if self._asked is not None:
            self._asked.sent += 1
        self._owe(request, Work.of(cached_est, est_tokens - cached_est))
        if not self._sees_starts:
            self._begin(request, now)
        self.counts.predicted_cached_tokens += max(0, min(cached_est, est_tokens))

    def started(self, rid: str, now: float, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine scheduled it; its real length, and what it found in caches (its own and pulled)."""
        self._sees_starts = True
        request = self._touch(rid, now)
        if request is None or request.started:
            return
        request.started = True
        if not request.prefilled:
            self._owe(request, Work.of(cached_tokens, prompt_tokens - cached_tokens))
            self._begin(request, now)
        self.counts.prompt_tokens += max(0, prompt_tokens)
        self.counts.cached_tokens += max(0, min(cached_tokens, prompt_tokens))

    def prefilled(self, rid: str, now: float, seconds: float) -> None:
        """Its prompt is computed; that took `seconds` from when it was scheduled."""
        request = self._touch(rid, now)
        if request is None:
            return
        if request.started:
            self._learn(request, now, min(seconds, now - self._computed_at))
        self._prompt_done(request, now)

    def first_byte(self, rid: str, now: float) -> None:
        """The first byte of a streamed answer came. Do not report it for answers that come in one piece."""
        request = self._touch(rid, now)
        if request is None or request.first_byte is not None:
            return
        request.first_byte = request.last_byte = now
        request.tokens = max(1, request.tokens)
        self._learnt.ttft.add((now - request.dispatched) * 1000)
        if request.at_once and not self._sees_starts:
            self._learn(request, now, now - self._progress)
        self._prompt_done(request, now)

    def chunk(self, rid: str, now: float, tokens: int = 1) -> None:
        """More of a streamed answer came, `tokens` tokens as far as one can tell."""
        request = self._touch(rid, now)
        if request is None:
            return
        if request.first_byte is None:
            self.first_byte(rid, now)
            return
        request.last_byte = now
        request.tokens += max(0, tokens)

    def finished(self, rid: str, now: float, output_tokens: int | None = None) -> None:
        """It is done. `output_tokens` from the engine's usage, where known."""
        request = self._end(rid)
        if request is None:
            return
        self._moved()
        self.counts.finished += 1
        self._learnt.ended(now)
        tokens = request.tokens if output_tokens is None else max(0, output_tokens)
        self.counts.output_tokens += tokens
        self._learnt.whole.add((now - request.dispatched) * 1000)
        if request.first_byte is not None and request.last_byte is not None and tokens > 1:
            seconds = request.last_byte - request.first_byte
            if seconds > 0:
                self._learnt.gap.add(seconds / (tokens - 1) * 1000)
                self._learnt.decode.add(tokens - 1, seconds)

    def failed(self, rid: str, now: float) -> None:
        """It ended without an answer (error, abort, client gone): nothing is learnt from its times."""
        if self._end(rid) is not None:
            self.counts.failed += 1

    def engine_load(self, now: float, running: int, waiting: int, kv_use: float) -> None:
        """What the engine itself reports. Nonsense is brought into range: the engine is ours, or an unknown one."""
        self._take(running, waiting, kv_use, _Since(now, self._dispatched), asked=False)
        self._moved()

    def asking(self, now: float) -> None:
        """The engine is asked for a report; `answered` gives it."""
        self._asked = _Since(now, self._dispatched)

    def answered(self, running: int, waiting: int, kv_use: float) -> None:
        """Its answer, as old as the question. Nothing, if it was lost or reported by itself meanwhile."""
        if self._asked is not None:
            self._take(running, waiting, kv_use, self._asked, asked=True)

    def _take(self, running: int, waiting: int, kv_use: float, since: _Since, *, asked: bool) -> None:
        running, waiting = (max(0, min(count, MAX_REPORTED)) for count in (running, waiting))
        use = 0.0 if math.isnan(kv_use) else min(1.0, max(0.0, kv_use))
        self._report, self._asked = _Report(running, waiting, use, since, asked), None

    def engine_lost(self, now: float) -> None:
        """The engine is gone, with all its requests; what was learnt about its speed stays."""
        self.counts.failed += len(self._requests)
        self._requests.clear()
        self._ahead.clear()
        self._begun.clear()
        self._report = self._asked = None

    @property
    def active(self) -> int:
        """Requests that the engine has from us."""
        return len(self._requests)

    @property
    def prefill(self) -> PrefillTime:
        """How long a prompt takes to compute; a prior until one was."""
        time = self._learnt.prefill.time
        return time if time.measured else PRIOR

    @property
    def decode_tps(self) -> float:
        """Tokens per second of one stream; a prior until one is measured."""
        return self._learnt.decode.per_second or PRIOR_DECODE_TPS

    @property
    def gap_s(self) -> float:
        """Mean gap between a stream's tokens, 95th percentile of the last requests, seconds; 0 = not measured."""
        return self._learnt.gap.quantile(0.95) / 1000.0

    @property
    def owed_s(self) -> float:
        """Seconds that all prompts should take that are not known to be computed."""
        return self.prefill.ms_of(self._ahead) / 1000.0

    def queued_ms(self, now: float) -> float:
        """Milliseconds until every prompt that is here is computed; of a running one as much is done as time passed."""
        return self.prefill.ms_of(self._ahead) - self._done_ms(now)

    def queued_tokens(self, now: float) -> int:
        """Prompt tokens still to be computed; what the engine has computed of a running prefill is estimated."""
        begun_ms = self.prefill.ms_of(self._begun)
        done = self._begun.tokens * self._done_ms(now) / begun_ms if begun_ms > 0 else 0.0
        return self._ahead.tokens - int(done)

    def _done_ms(self, now: float) -> float:
        return min(self.prefill.ms_of(self._begun), max(0.0, now - self._progress) * 1000)

    def vector(
        self,
        now: float,
        *,
        ready: bool,
        draining: bool,
        rtts: dict[str, float] | None = None,
        rates: dict[str, float] | None = None,
        copy_rate: float = 0.0,
    ) -> LoadVector:
        """The load vector as of `now`. What was never measured is 0."""
        self._forget(now)
        self._measure(now)
        return self.glance(now, ready=ready, draining=draining, rtts=rtts, rates=rates, copy_rate=copy_rate)

    def glance(
        self,
        now: float,
        *,
        ready: bool,
        draining: bool,
        rtts: dict[str, float] | None = None,
        rates: dict[str, float] | None = None,
        copy_rate: float = 0.0,
    ) -> LoadVector:
        """The same for this node's own decisions: what it learnt may be `GLANCE_S` old, what it has is as of `now`."""
        self._renew(now)
        running, waiting = self._occupancy(now)
        report, time, ahead, begun = self._report, self.prefill, self._ahead, self._begun
        begun_ms, done_ms = time.ms_of(begun), (now - self._progress) * 1000
        done_ms = 0.0 if done_ms < 0 else begun_ms if done_ms > begun_ms else done_ms
        queued_ms = time.ms_of(ahead) - done_ms
        return LoadVector(
            ready,
            draining,
            running,
            waiting,
            self.slots,
            ahead.tokens - int(begun.tokens * done_ms / begun_ms if begun_ms > 0 else 0.0),
            self.moves,
            report.kv_use if report is not None and (not report.asked or report.fresh(now)) else 0.0,
            queued_ms if queued_ms > 0 else 0.0,
            *self._measured,
            rtts or {},
            rates or {},
            copy_rate,
        )

    def speeds(self, now: float) -> LoadVector:
        """What was learnt alone, at most `GLANCE_S` old: a vector of an engine that has nothing to do."""
        self._renew(now)
        return self._speeds

    def _renew(self, now: float) -> None:
        if now - self._measured_at > GLANCE_S:
            self._measure(now)

    def _measure(self, now: float) -> None:
        """Work out what a vector says of what was learnt, in the order of its fields."""
        learnt = self._learnt
        self._measured_at = now
        self._measured = (
            learnt.weight(now),
            learnt.prefill.time,
            learnt.decode.per_second,
            learnt.ttft.quantile(0.5),
            learnt.ttft.quantile(0.95),
            learnt.gap.quantile(0.5),
            learnt.gap.quantile(0.95),
            learnt.whole.quantile(0.5),
            learnt.whole.quantile(0.95),
        )
        self._speeds = LoadVector(True, False, 0, 0, self.slots, 0, 0, 0.0, 0.0, *self._measured, {}, {})

    def validate(self) -> None:
        """Every invariant of the books, for tests."""
        assert len(self._requests) <= MAX_REQUESTS
        for owed, works in (
            (self._ahead, [r.work for r in self._requests.values()]),
            (self._begun, [r.work for r in self._requests.values() if r.begun]),
        ):
            assert owed.prompts == sum(work.prompts for work in works)
            assert owed.tokens == sum(work.tokens for work in works)
            assert math.isclose(owed.pairs, sum(work.pairs for work in works), rel_tol=1e-6, abs_tol=1.0)
        for since in (self._report.since if self._report is not None else None, self._asked):
            if since is not None:
                assert since.sent == sum(1 for r in self._requests.values() if r.number > since.number)
        self._learnt.validate()
        for request in self._requests.values():
            assert request.work.tokens >= 0
            assert request.prefilled or request.first_byte is None
            assert not request.work.tokens or not request.prefilled
            assert request.first_byte is None or (request.last_byte or 0) >= request.first_byte

    def _occupancy(self, now: float) -> tuple[int, int]:
        ours = len(self._requests)
        report = self._report
        if report is not None and report.fresh(now):
            theirs = max(0, report.running + report.waiting - report.since.ended) + report.since.sent
            total = max(ours, theirs)
            running = min(report.running, total)
            if report.waiting == 0:
                # Nobody queued there: what came since runs too, as far as slots are known to be free.
                running = min(total, max(running, self.slots or running))
            return running, total - running
        if self._sees_starts:
            running = sum(1 for request in self._requests.values() if request.started or request.prefilled)
        else:
            running = min(ours, self.slots) if self.slots else ours
        return running, ours - running

    def _moved(self) -> None:
        self.moves = (self.moves + 1) % MAX_TOKENS

    def _touch(self, rid: str, now: float) -> _Request | None:
        """The engine did something for a request."""
        self._moved()
        request = self._requests.get(rid)
        if request is None:
            self.counts.unknown += 1
            return None
        request.touched = now
        self._requests.move_to_end(rid)
        return request

    def _owe(self, request: _Request, work: Work) -> None:
        """It has `work` left to compute of its prompt."""
        self._ahead.exchange(request.work, work)
        if request.begun:
            self._begun.exchange(request.work, work)
        request.work = request.prompt = work

    def _begin(self, request: _Request, now: float) -> None:
        """The engine computes its prompt now."""
        if not request.begun:
            if not self._begun.prompts:
                self._progress = now
            request.begun = True
            self._begun.add(request.work)

    def _settle(self, request: _Request) -> None:
        """Nothing of its prompt is left to compute."""
        prompt = request.prompt
        self._owe(request, NO_WORK)
        request.prompt = prompt

    def _prompt_done(self, request: _Request, now: float) -> None:
        if not request.prefilled:
            request.prefilled = True
            self._settle(request)
            self._progress = now

    def _learn(self, request: _Request, now: float, seconds: float) -> None:
        """Its prompt was the one that the engine finished, in `seconds` since it had finished another or had none."""
        if not request.timed and request.prompt.tokens >= MIN_TOKENS:
            self._learnt.prompt(request.prompt, seconds, now)
        request.timed = True
        self._computed_at = now

    def _end(self, rid: str) -> _Request | None:
        request = self._requests.pop(rid, None)
        if request is None:
            self.counts.unknown += 1
            return None
        self._leave(request)
        return request

    def _leave(self, request: _Request) -> None:
        """It is counted no more."""
        self._settle(request)
        if self._report is not None:
            self._report.since.end(request)
        if self._asked is not None:
            self._asked.end(request)

    def _forget(self, now: float) -> None:
        while self._requests:
            rid, request = next(iter(self._requests.items()))
            if now - request.touched <= FORGET_S:
                return
            self._leave(self._requests.pop(rid))
            self.counts.forgotten += 1
