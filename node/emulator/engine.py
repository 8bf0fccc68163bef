"""An emulated engine in virtual time: continuous batching over a paged prefix cache. Pure.

Events in (`submit`, `abort`, `insert`, `advance`), actions out (`advance`), and when to come back (`due`).

Rules, those of vLLM's scheduler as far as a router can see them:
1. Work is done in steps. What arrives during a step is seen at the next one; so is an abort.
2. A step first serves who runs (one token for a decoding sequence, the next piece of a prompt otherwise), then admits
   who waits, in order, within `step_tokens` and `max_num_seqs`, each if all of its prompt fits into the free blocks.
3. At least one token of a prompt is computed, whatever the cache holds.
4. When a running sequence finds no block, the one admitted last loses all of its own and waits in front.
5. The model consults neither clock nor randomness: the same events give the same actions.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as Keys
from dataclasses import dataclass
from typing import Protocol

from node.emulator.cache import BlockCache
from node.emulator.config import EngineConfig
from node.emulator.job import Action, Done, Evicted, Job, Preempted, Started, Stored, Tokens
from node.emulator.sequence import Sequence
from node.emulator.step import Step


class Pool(Protocol):
    """The second tier behind the cache: the node's pool of KV blocks."""

    def find(self, job: Job, start: int, stop: int) -> int:
        """How many blocks from index `start` (before `stop`) it holds without a gap."""
        ...

    def load(self, job: Job, start: int, count: int) -> int:
        """Take them out; returns how many really came."""
        ...


@dataclass(slots=True)
class EngineCounts:
    """Totals since start. Tokens, except where the name says otherwise."""

    queried: int = 0
    hit: int = 0
    external_hit: int = 0
    prompt: int = 0
    generated: int = 0
    finished_requests: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_s: float = 0.0


class EmulatedEngine:
    """One engine. `every_step`: report each token when it is there; otherwise runs of decoding are one action."""

    def __init__(self, config: EngineConfig, *, every_step: bool = False, pool: Pool | None = None) -> None:
        self.config = config
        self.cache = BlockCache(config.blocks)
        self.counts = EngineCounts()
        self._every_step = every_step
        self._pool = pool
        self._clock = 0.0
        self._arriving: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._jobs: dict[str, Sequence] = {}
        self._step: Step | None = None
        self._actions: list[Action] = []

    # --- events

    def submit(self, job: Job, now: float) -> None:
        """A request arrives. Its id must be new; prompt and answer have at least one token and fit the context."""
        assert job.rid not in self._jobs and job.prompt_tokens > 0 and job.output_tokens > 0
        assert job.prompt_tokens + job.output_tokens <= self.config.max_model_len
        self._run(now)
        timing = self.config.timing
        sequence = Sequence(job)
        self._jobs[job.rid] = sequence
        self._arrive(sequence, now + timing.accept_s + job.prompt_tokens * timing.accept_token_s)

    def abort(self, rid: str, now: float) -> bool:
        """Whoever wanted it is gone. False: no such request. Nothing more is said of it."""
        self._run(now)
        sequence = self._jobs.pop(rid, None)
        if sequence is None:
            return False
        sequence.aborted = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif self._step is not None and sequence in self._running:
            self._step.count = self._step.boundary(now)
        return True

    def insert(self, keys: Keys[Hashable], now: float) -> None:
        """Blocks came into the cache from outside."""
        self._run(now)
        self.cache.insert(keys)
        self._note_evictions(now)

    def advance(self, now: float) -> list[Action]:
        """Everything that happened up to `now`, in order."""
        self._run(now)
        actions, self._actions = self._actions, []
        return actions

    # --- state

    @property
    def due(self) -> float | None:
        """When the next thing happens by itself; None = never."""
        if self._actions:
            return self._clock
        if self._step is not None:
            return self._step.end
        if self._waiting:
            return self._clock
        return self._arriving[0][0] if self._arriving else None

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests accepted and not in the batch."""
        return len(self._jobs) - len(self._running)

    def pending(self) -> list[Sequence]:
        """Every request that is not done, for whoever may know all (an oracle, a test)."""
        return list(self._jobs.values())

    def sequence(self, rid: str) -> Sequence:
        """One of these."""
        return self._jobs[rid]

    def cached(self, sequence: Sequence) -> int:
        """Tokens of it that the cache holds now."""
        return self._match(sequence) * self.config.block_size

    def step_left(self, now: float) -> float:
        """Seconds until somebody new can be admitted; 0 between steps."""
        return self._step.end_of(self._step.boundary(now)) - now if self._step is not None else 0.0

    def validate(self) -> None:
        """Every invariant, for tests."""
        self.cache.validate()
        assert len(self._running) <= self.config.max_num_seqs
        assert not self._waiting or not {id(s) for s in self._waiting} & {id(s) for s in self._running}
        assert sum(s.private for s in self._running) == self.cache._private
        held: dict[Hashable, int] = {}
        for sequence in self._running:
            for key in sequence.held:
                held[key] = held.get(key, 0) + 1
            assert sequence.blocks * self.config.block_size >= sequence.computed
            assert sequence.aborted or 0 <= sequence.emitted < sequence.job.output_tokens
        assert held == self.cache._users

    # --- time

    def _run(self, now: float) -> None:
        while True:
            if self._step is not None:
                if self._step.end > now:
                    return
                step, self._step = self._step, None
                self._clock = step.end
                self._finish(step)
            start = self._next_start()
            if start is None or start > now:
                return
            self._clock = start
            self._take_arrivals(start)
            self._step = self._plan(start)

    def _next_start(self) -> float | None:
        if self._running or self._waiting:
            return self._clock
        return max(self._clock, self._arriving[0][0]) if self._arriving else None

    def _arrive(self, sequence: Sequence, at: float) -> None:
        heapq.heappush(self._arriving, (at, next(self._numbers), sequence))
        if self._step is not None and self._step.count > 1:
            self._step.count = self._step.boundary(at)

    def _take_arrivals(self, now: float) -> None:
        while self._arriving and self._arriving[0][0] <= now:
            _, _, sequence = heapq.heappop(self._arriving)
            if sequence.aborted:
                continue
            if sequence.loading:
                self._loaded(sequence, now)
                self._waiting.appendleft(sequence)
            else:
                self._waiting.append(sequence)

    # --- a step

    def _plan(self, now: float) -> Step | None:
        timing, budget = self.config.timing, self.config.step_tokens
        step = Step(now, 1, timing.step_s)
        if self._serve_running(step, budget, now):
            budget -= len(step.decoding) + sum(count for _, count in step.prefilling)
            self._admit(step, budget, now)
        self._note_evictions(now)
        if not step.decoding and not step.prefilling:
            return None
        for sequence, count in step.prefilling:
            step.first_s += timing.prefill(sequence.computed, count)
        decoding = step.decoding
        step.first_s += timing.decode(len(decoding), sum(sequence.computed + 1 for sequence in decoding))
        if not step.prefilling and not self._every_step:
            self._lengthen(step)
        self.counts.steps += 1
        return step

    def _serve_running(self, step: Step, budget: int, now: float) -> bool:
        """Give everybody in the batch their next tokens. False: somebody was preempted for it."""
        index, whole = 0, True
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            count = min(sequence.missing, budget)
            if not self._reserve(sequence, sequence.computed + count):
                victim = self._running.pop()
                self._preempt(victim, now)
                whole = False
                continue
            self._enter(step, sequence, count)
            budget -= count
            index += 1
        return whole

    def _admit(self, step: Step, budget: int, now: float) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            matched = self._match(sequence)
            if self._load_first(sequence, matched, now):
                self._waiting.popleft()
                continue
            held = sequence.job.keys[:matched]
            count = min(sequence.known - matched * self.config.block_size, budget)
            if not self._fits(sequence, matched):
                return
            self._waiting.popleft()
            self._running.append(sequence)
            self.cache.acquire(held)
            sequence.held = list(held)
            sequence.seen = matched
            sequence.computed = matched * self.config.block_size
            self._reserve(sequence, sequence.computed + count)
            self._note_start(sequence, now)
            self._enter(step, sequence, count)
            budget -= count

    def _match(self, sequence: Sequence) -> int:
        if not self.config.enable_prefix_caching:
            return 0
        limit = min(len(sequence.job.keys), (sequence.known - 1) // self.config.block_size)
        return self.cache.match(sequence.job.keys, limit)

    def _fits(self, sequence: Sequence, matched: int) -> bool:
        """There is room for all of it, not only for the piece that is computed next (`scheduler_reserve_full_isl`)."""
        need = -(-sequence.known // self.config.block_size) - matched
        return need <= self.cache.available - self.cache.idle_among(sequence.job.keys[:matched])

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Have blocks for its first `tokens` tokens."""
        need = -(-tokens // self.config.block_size) - sequence.blocks
        if need <= 0:
            return True
        if not self.cache.allocate(need):
            return False
        sequence.private += need
        return True

    def _enter(self, step: Step, sequence: Sequence, count: int) -> None:
        if count == 1 and sequence.decodes:
            step.decoding.append(sequence)
        else:
            step.prefilling.append((sequence, count))

    def _lengthen(self, step: Step) -> None:
        """Nothing but decoding: go on until somebody is done, somebody comes, or blocks run short."""
        step.more_s = len(step.decoding) * self.config.timing.context_s
        step.count = min(sequence.left for sequence in step.decoding)
        if self._arriving:
            step.count = step.boundary(self._arriving[0][0])
        size = self.config.block_size
        while step.count > 1:
            need = sum(max(0, -(-(s.computed + step.count) // size) - s.blocks) for s in step.decoding)
            if need <= self.cache.available:
                break
            step.count //= 2
        for sequence in step.decoding:
            self._reserve(sequence, sequence.computed + step.count)

    def _finish(self, step: Step) -> None:
        self.counts.busy_s += step.end - step.start
        for sequence in step.decoding:
            sequence.computed += step.count
            self._emit(sequence, step.count, step.end)
        for sequence, count in step.prefilling:
            sequence.computed += count
            if sequence.missing == 0:
                self._emit(sequence, 1, step.end)
            else:
                self._publish(sequence, step.end)
        self._running = [sequence for sequence in self._running if not self._leaves(sequence, step.end)]

    def _emit(self, sequence: Sequence, count: int, at: float) -> None:
        first = sequence.emitted == 0
        sequence.emitted += count
        self.counts.generated += count
        self._publish(sequence, at)
        if not sequence.aborted:
            self._actions.append(Tokens(sequence.job.rid, at, count, first))

    def _publish(self, sequence: Sequence, at: float) -> None:
        keys = sequence.job.keys
        full = min(sequence.computed // self.config.block_size, len(keys))
        if full <= sequence.seen or not self.config.enable_prefix_caching:
            return
        fresh = [key for key in keys[sequence.seen : full] if self.cache.publish(key)]
        sequence.seen = full
        sequence.private -= len(fresh)
        sequence.held += fresh
        if fresh:
            self._actions.append(Stored(sequence.job.rid, at, tuple(fresh)))

    def _leaves(self, sequence: Sequence, at: float) -> bool:
        if sequence.left > 0 and not sequence.aborted:
            return False
        self._release(sequence)
        if not sequence.aborted:
            del self._jobs[sequence.job.rid]
            self.counts.finished_requests += 1
            self._actions.append(Done(sequence.job.rid, at))
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self._release(sequence)
        sequence.computed = sequence.seen = 0
        sequence.load_tried = False
        self.counts.preemptions += 1
        if not sequence.aborted:
            self._waiting.appendleft(sequence)
            self._actions.append(Preempted(sequence.job.rid, now))

    def _release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.held, sequence.private)
        sequence.held, sequence.private = [], 0

    # --- the pool behind the cache

    def _load_first(self, sequence: Sequence, matched: int, now: float) -> bool:
        """The pool has more of its prefix: fetch that, and see it again when it is there."""
        if self._pool is None or sequence.load_tried:
            return False
        sequence.load_tried = True
        limit = min(len(sequence.job.keys), (sequence.known - 1) // self.config.block_size)
        found = self._pool.find(sequence.job, matched, limit)
        if not found:
            return False
        sequence.loading = found
        heapq.heappush(self._arriving, (now + found * self.config.timing.load_block_s, next(self._numbers), sequence))
        return True

    def _loaded(self, sequence: Sequence, now: float) -> None:
        assert self._pool is not None
        matched = self._match(sequence)
        came = self._pool.load(sequence.job, matched, sequence.loading)
        sequence.loading, sequence.loaded = 0, came
        self.cache.insert(sequence.job.keys[: matched + came])
        self._note_evictions(now)

    # --- what is told

    def _note_start(self, sequence: Sequence, now: float) -> None:
        if sequence.started:
            return
        sequence.started = True
        cached = sequence.computed
        external = min(sequence.loaded * self.config.block_size, cached)
        prompt = sequence.job.prompt_tokens
        self.counts.prompt += prompt
        self.counts.queried += prompt
        self.counts.hit += cached - external
        self.counts.external_hit += external
        self._actions.append(Started(sequence.job.rid, now, cached - external, external))

    def _note_evictions(self, now: float) -> None:
        evicted = self.cache.take_evicted()
        if evicted:
            self._actions.append(Evicted(now, tuple(evicted)))
