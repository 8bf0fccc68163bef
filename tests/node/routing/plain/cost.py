"""The plain form of `node.policy.cost`, one statement for each term: what the faster one must decide alike."""

from __future__ import annotations

import random

from node.policy.base import CandidateCost, Choice, Question
from node.policy.best_pull import NO_PULL, SAME_MS, BestPull, Way, shared
from node.policy.cost import CostConfig
from node.policy.pull import PullModel
from node.policy.times import PRIOR_GAP_MS, PRIOR_REQUEST_MS
from node.prefill import PRIOR, PrefillTime
from node.view import Candidate, Unseen

#: Used where neither the candidate nor its peers have measured anything.
PRIOR_SLOTS = 256


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
        near = set(matched) if question.near is None else question.near
        certain = [candidate for candidate in everyone if candidate.is_self or candidate.name in near]
        if len(certain) > self.config.holders + 1:
            certain.sort(key=lambda candidate: (candidate.is_self, matched.get(candidate.name, 0)), reverse=True)
            del certain[self.config.holders + 1 :]
        names = {candidate.name for candidate in certain}
        drawn: list[Candidate] = []
        # Draws instead of a shuffle: the cluster may have a thousand nodes.
        count = max(self.config.sample, min(self.config.drawn, len(everyone) // self.config.drawn_one_in))
        for _ in range(4 * count):
            candidate = everyone[int(rng.random() * len(everyone))]
            if candidate.name not in names:
                names.add(candidate.name)
                drawn.append(candidate)
                if len(drawn) == count:
                    break
        drawn.sort(key=lambda candidate: _known_queue_ms(candidate, question.unseen.get(candidate.name, _NOTHING)))
        return certain + drawn[: self.config.sample]

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
        giving = question.giving_tokens
        holders = [source for source in question.sources if giving.get(source.name)]
        holders.sort(key=lambda source: (source.name != question.force_source, -giving[source.name]))
        return holders[: self.config.sources + 1]

    def _cost(self, candidate: Candidate, question: Question, holders: list[Candidate], now: float) -> CandidateCost:
        load, typical = candidate.load, question.typical
        share = self.config.few_samples / (load.samples + self.config.few_samples)
        prefill = _prefill(load.prefill, typical.prefill, share)
        gap_ms = _mixed(load.itl_p50_ms or (1000 / load.decode_tps if load.decode_tps else 0.0), typical.itl_ms, share)
        gap_ms = gap_ms or PRIOR_GAP_MS
        request_ms = _mixed(load.e2e_p50_ms, typical.e2e_ms, share) or PRIOR_REQUEST_MS
        age_s = candidate.age_s(now)
        trust = 1.0 if candidate.is_self else 0.5 ** (age_s / self.config.half_life_s)
        since = question.unseen.get(candidate.name, _NOTHING)
        queued_ms = load.queued_ms if load.prefill.measured else prefill.ms(0, load.queued_tokens)
        left_ms = max(0.0, queued_ms - age_s * 1000)
        queue_ms = trust * left_ms + (1 - trust) * typical.queued_ms + since.sent_ms
        line = trust * load.prompts + (1 - trust) * typical.prompts + since.sent
        trust = 1.0 if candidate.is_self else 0.5 ** (age_s / self.config.active_half_life_s)
        active = trust * max(0, load.active - since.finished) + (1 - trust) * typical.active + since.sent
        slots = load.slots or PRIOR_SLOTS
        beyond = active + 1 - slots
        if beyond > 0:
            queue_ms = max(queue_ms, beyond * request_ms / slots)
            queue_ms += request_ms if question.refused else 0.0
        queue_ms += request_ms * self._lacking(candidate, question)
        held = question.matched_tokens.get(candidate.name, 0)
        pull = self._best_pull(candidate, question, holders, held, prefill) if holders else NO_PULL
        cached = held + pull.tokens
        hop_ms = candidate.hop_ms
        prefill_ms = prefill.ms(cached, max(0, question.prompt_tokens - cached))
        decode_ms = gap_ms * (self.config.decode_share * question.output_tokens + self.config.active_share * active)
        barrier_ms = self._barrier(candidate, request_ms)
        best = max([cached, *question.matched_tokens.values()])
        spared_ms = prefill_ms - prefill.ms(best, max(0, question.prompt_tokens - best))
        again_ms = spared_ms if best > cached else 0.0
        copied_ms = prefill.ms(held, max(0, question.prompt_tokens - held)) - prefill_ms if pull.tokens else 0.0
        burden_ms = (1 + line * typical.prompts) * max(0.0, again_ms + question.reuse * (again_ms + copied_ms))
        return CandidateCost(
            name=candidate.name,
            total_ms=hop_ms + queue_ms + pull.ms + prefill_ms + decode_ms + barrier_ms + burden_ms,
            hop_ms=hop_ms,
            queue_ms=queue_ms,
            pull_ms=pull.ms,
            prefill_ms=prefill_ms,
            decode_ms=decode_ms,
            barrier_ms=barrier_ms,
            burden_ms=burden_ms,
            matched_tokens=held,
            pulled_tokens=pull.tokens,
            matched_chunks=question.matched_chunks.get(candidate.name, 0),
            source=pull.source,
            source_chunks=pull.chunks,
            age_ms=age_s * 1000,
            helpers=pull.helpers,
        )

    def _barrier(self, candidate: Candidate, request_ms: float) -> float:
        use = min(self.config.barrier_top, candidate.load.kv_use)
        return self.config.barrier_share * request_ms * use / (1 - use)

    def _lacking(self, candidate: Candidate, question: Question) -> float:
        """Share of the KV in use that must be given back before the prompt has room."""
        info, use = question.info(candidate), candidate.load.kv_use
        if info is None or not info.kv_tokens or not use:
            return 0.0
        return min(1.0, max(0.0, use + question.prompt_tokens / info.kv_tokens - 1) / use)

    def _best_pull(
        self, candidate: Candidate, question: Question, holders: list[Candidate], held: int, prefill: PrefillTime
    ) -> BestPull:
        """The source that saves most, or none."""
        info = question.info(candidate)
        if info is None or not info.fingerprint or not info.kv_token_bytes:
            return NO_PULL
        best, saved = NO_PULL, 0.0
        ways = {}
        for source in holders:
            extra = question.giving_tokens.get(source.name, 0) - held
            if extra <= 0 or source.name == candidate.name:
                continue
            theirs = question.info(source)
            if theirs is None or theirs.fingerprint != info.fingerprint or not source.exchanges_kv_with(candidate):
                continue
            rtt = candidate.load.rtts.get(source.name, source.hop_ms if candidate.is_self else candidate.hop_ms)
            net = candidate.load.rates.get(source.name, 0.0) or self.pull.guess(question.typical.net, rtt)
            ways[source.name] = Way(source.name, extra, rtt, net)
        forced = question.force_source
        for name, way in ways.items():
            if name != forced if forced is not None else way.worse(ways.values()):
                continue
            recompute_ms = prefill.ms(held, way.tokens) - prefill.fixed_ms
            memory_ms = way.tokens * info.kv_token_bytes / (candidate.load.copy_rate or self.pull.memory) * 1000
            helpers, net_ms = shared(self.pull, way, ways, info.kv_token_bytes)
            pull_ms = self.pull.lookup_ms + way.rtt_ms + memory_ms + self.pull.step_ms + net_ms
            if forced is None and not self.pull.pays(pull_ms, recompute_ms):
                continue
            if forced is not None or recompute_ms - pull_ms > saved + SAME_MS:
                saved = recompute_ms - pull_ms
                best = BestPull(name, way.tokens, pull_ms, question.giving_chunks.get(name, 0), helpers)
        return best


def _known_queue_ms(candidate: Candidate, since: Unseen) -> float:
    load = candidate.load
    slots = load.slots or PRIOR_SLOTS
    beyond = load.active + since.sent - since.finished + 1 - slots
    line_ms = beyond * (load.e2e_p50_ms or PRIOR_REQUEST_MS) / slots if beyond > 0 else 0.0
    return load.queued_ms + since.sent_ms + line_ms


_NOTHING = Unseen()


def _prefill(own: PrefillTime, usual: PrefillTime, share: float) -> PrefillTime:
    if own.measured and usual.measured:
        return PrefillTime(*(mine + share * (other - mine) for mine, other in zip(own, usual, strict=True)))
    return own if own.measured else usual if usual.measured else PRIOR


def _mixed(own: float, usual: float, share: float) -> float:
    return own + share * (usual - own) if own > 0 and usual > 0 else max(own, usual)


def _reason(cost: CandidateCost, candidates: int) -> str:
    if cost.source is not None:
        return f"pull {cost.source_chunks} chunks from {cost.source}"
    if cost.matched_chunks:
        return f"prefix {cost.matched_chunks} chunks"
    return "least cost" if candidates > 1 else "only candidate"
