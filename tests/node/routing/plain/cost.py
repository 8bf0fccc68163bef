"""The first, plain form of `node.policy.cost`: what the faster one must decide alike. Kept as it was."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from node.policy.base import CandidateCost, Choice, Question
from node.policy.pull import PullModel
from node.view import Candidate, Unseen

#: Used where neither the candidate nor its peers have measured anything.
PRIOR_PREFILL_TPS = 1000.0
PRIOR_GAP_MS = 25.0
PRIOR_REQUEST_MS = 1000.0
PRIOR_SLOTS = 256


@dataclass(frozen=True, slots=True)
class CostConfig:
    """Constants of the formula. Defaults are for engines between a laptop and a data centre."""

    #: Seconds after which half of a gossiped number is trusted. Two or three gossip intervals.
    half_life_s: float = 2.0
    #: Up to so many candidates all contend; beyond, so many random ones and holders do.
    few: int = 4
    sample: int = 2
    holders: int = 3
    #: Up to so many candidates every cost is worked out, to be shown; beyond, those of the contenders.
    show: int = 16
    #: Sources weighed per candidate, those with the longest prefix first.
    sources: int = 3
    #: Costs so close to the lowest count as equal: milliseconds, and share of the work before the first token.
    tie_ms: float = 2.0
    tie_share: float = 0.05
    #: Share of the decoding time that counts against the time to the first token.
    decode_share: float = 0.25
    #: Gaps by which each active request delays ours.
    active_share: float = 0.5
    barrier_ms: float = 150.0
    #: KV use is cut off here, so that the barrier stays finite.
    barrier_top: float = 0.98


class PlainCost:
    """The default policy."""

    name = "cost"

    def __init__(self, config: CostConfig | None = None, pull: PullModel | None = None) -> None:
        self.config = config or CostConfig()
        self.pull = pull or PullModel()

    def choose(self, question: Question, now: float, rng: random.Random) -> Choice:
        """The cheapest contender, or one that is as good."""
        everyone = question.candidates
        contenders = self._contenders(question, rng)
        show_all = question.every or len(everyone) <= self.config.show
        holders = self._holders(question)
        costs = {
            candidate.name: self._cost(candidate, question, holders, now)
            for candidate in (everyone if show_all else contenders)
        }
        chosen = self._pick([costs[candidate.name] for candidate in contenders], contenders, rng)
        ranked = tuple(sorted(costs.values(), key=lambda cost: cost.total_ms))
        return Choice(chosen, _reason(chosen, len(everyone)), ranked)

    def cost_of(self, candidate: Candidate, question: Question, now: float) -> CandidateCost:
        """The terms of one candidate."""
        return self._cost(candidate, question, self._holders(question), now)

    def _contenders(self, question: Question, rng: random.Random) -> list[Candidate]:
        everyone = question.candidates
        if len(everyone) <= self.config.few:
            return list(everyone)
        matched = question.matched_tokens
        certain = [candidate for candidate in everyone if candidate.is_self or matched.get(candidate.name)]
        if len(certain) > self.config.holders + 1:
            certain.sort(key=lambda candidate: (candidate.is_self, matched.get(candidate.name, 0)), reverse=True)
            del certain[self.config.holders + 1 :]
        names = {candidate.name for candidate in certain}
        drawn: list[Candidate] = []
        # Draws instead of a shuffle: the cluster may have a thousand nodes.
        for _ in range(8 * self.config.sample):
            candidate = everyone[int(rng.random() * len(everyone))]
            if candidate.name not in names:
                names.add(candidate.name)
                drawn.append(candidate)
                if len(drawn) == self.config.sample:
                    break
        return certain + drawn

    def _pick(self, costs: list[CandidateCost], contenders: list[Candidate], rng: random.Random) -> CandidateCost:
        best = min(costs, key=lambda cost: cost.total_ms)
        before_first = best.hop_ms + best.queue_ms + best.pull_ms + best.prefill_ms
        limit = best.total_ms + self.config.tie_ms + self.config.tie_share * before_first
        near: list[CandidateCost] = []
        for candidate, cost in zip(contenders, costs, strict=True):
            # What is as fast but moves blocks is no tie: it costs the source and the network something too.
            if cost.total_ms <= limit and (cost.source is None or best.source is not None):
                if candidate.is_self:
                    return cost
                near.append(cost)
        return near[int(rng.random() * len(near))]

    def _holders(self, question: Question) -> list[Candidate]:
        """Possible sources, longest prefix first."""
        if question.forbid_pull:
            return []
        matched = question.matched_tokens
        if question.force_source is not None:
            return [source for source in question.sources if source.name == question.force_source]
        holders = [source for source in question.sources if matched.get(source.name)]
        holders.sort(key=lambda source: -matched[source.name])
        return holders[: self.config.sources + 1]

    def _cost(self, candidate: Candidate, question: Question, holders: list[Candidate], now: float) -> CandidateCost:
        prefill_tps, gap_ms, request_ms = _rates(candidate, question)
        age_s = candidate.age_s(now)
        trust = 1.0 if candidate.is_self else 0.5 ** (age_s / self.config.half_life_s)
        since = question.unseen.get(candidate.name, _NOTHING)
        typical = question.typical
        load = candidate.load
        left = max(0.0, load.queued_tokens - prefill_tps * age_s)
        queued = trust * left + (1 - trust) * typical.queued_tokens + since.sent_tokens
        active = trust * max(0, load.active - since.finished) + (1 - trust) * typical.active + since.sent
        slots = load.slots or PRIOR_SLOTS
        beyond = max(0.0, active + 1 - slots)
        held = question.matched_tokens.get(candidate.name, 0)
        pull = self._best_pull(candidate, question, holders, held, prefill_tps) if holders else _NO_PULL
        missing = max(0, question.prompt_tokens - held - pull.tokens)
        hop_ms = candidate.hop_ms
        queue_ms = max(queued / prefill_tps * 1000, beyond * request_ms / slots)
        prefill_ms = missing / prefill_tps * 1000
        decode_ms = gap_ms * (self.config.decode_share * question.output_tokens + self.config.active_share * active)
        barrier_ms = self._barrier(candidate, question)
        return CandidateCost(
            name=candidate.name,
            total_ms=hop_ms + queue_ms + pull.ms + prefill_ms + decode_ms + barrier_ms,
            hop_ms=hop_ms,
            queue_ms=queue_ms,
            pull_ms=pull.ms,
            prefill_ms=prefill_ms,
            decode_ms=decode_ms,
            barrier_ms=barrier_ms,
            matched_tokens=held,
            pulled_tokens=pull.tokens,
            matched_chunks=question.matched_chunks.get(candidate.name, 0),
            source=pull.source,
            source_chunks=pull.chunks,
            age_ms=age_s * 1000,
        )

    def _barrier(self, candidate: Candidate, question: Question) -> float:
        info = question.info(candidate)
        need = question.prompt_tokens / info.kv_tokens if info is not None and info.kv_tokens else 0.0
        use = min(self.config.barrier_top, candidate.load.kv_use + need)
        return self.config.barrier_ms * use / (1 - use)

    def _best_pull(
        self, candidate: Candidate, question: Question, holders: list[Candidate], held: int, tps: float
    ) -> _Pull:
        """The source that saves most, or none."""
        info = question.info(candidate)
        if info is None or not info.fingerprint or not info.kv_token_bytes:
            return _NO_PULL
        best, saved = _NO_PULL, 0.0
        for source in holders:
            extra = question.matched_tokens.get(source.name, 0) - held
            if extra <= 0 or source.name == candidate.name:
                continue
            theirs = question.info(source)
            if theirs is None or theirs.fingerprint != info.fingerprint:
                continue
            recompute_ms = extra / tps * 1000
            rtt = candidate.load.rtts.get(source.name, source.hop_ms if candidate.is_self else candidate.hop_ms)
            net = candidate.load.rates.get(source.name, 0.0)
            pull_ms = self.pull.pull_ms(extra, info.kv_token_bytes, rtt, net)
            forced = question.force_source is not None
            if not forced and not self.pull.pays(pull_ms, recompute_ms):
                continue
            if forced or recompute_ms - pull_ms > saved:
                saved = recompute_ms - pull_ms
                best = _Pull(source.name, extra, pull_ms, question.matched_chunks.get(source.name, 0))
        return best


class _Pull(NamedTuple):
    source: str | None = None
    tokens: int = 0
    ms: float = 0.0
    chunks: int = 0


_NO_PULL = _Pull()
_NOTHING = Unseen()


def _rates(candidate: Candidate, question: Question) -> tuple[float, float, float]:
    """Prefill tokens a second, gap and whole request in ms: its own, those typical for the model, or priors."""
    load, typical = candidate.load, question.typical
    gap_ms = load.itl_p50_ms or (1000 / load.decode_tps if load.decode_tps > 0 else 0.0)
    return (
        load.prefill_tps or typical.prefill_tps or PRIOR_PREFILL_TPS,
        gap_ms or typical.itl_ms or PRIOR_GAP_MS,
        load.e2e_p50_ms or typical.e2e_ms or PRIOR_REQUEST_MS,
    )


def _reason(cost: CandidateCost, candidates: int) -> str:
    if cost.source is not None:
        return f"pull {cost.source_chunks} chunks from {cost.source}"
    if cost.matched_chunks:
        return f"prefix {cost.matched_chunks} chunks"
    return "least cost" if candidates > 1 else "only candidate"
