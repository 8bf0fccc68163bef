"""Cost: the candidate that should be done first, everything in milliseconds.

    total   = hop + queue + pull + prefill + decode + barrier + burden
    hop     = round trip to the candidate
    queue   = max(prompts queued there, requests beyond its slots * request time / slots) + room
    room    = request time * what the prompt lacks of free KV / KV in use
    pull    = fetching the prefix that a source has and the candidate lacks, where that pays (`node.policy.best_pull`)
    prefill = computing the tokens neither held nor pulled, by their number and what lies before them (`node.prefill`)
    decode  = DECODE_SHARE * output tokens * gap + ACTIVE_SHARE * active requests * gap
    barrier = BARRIER_SHARE * request time * k / (1 - k), k = KV use
    burden  = (1 + line * crowd) * (again + reuse * (again + copied))
    again   = prefill - what it would be with the longest prefix of all nodes
    copied  = prefill without the pull - prefill
    line    = requests at the candidate whose prompt is not computed yet; crowd: the mean of that over all nodes

Times of a candidate are its own, mixed with those typical for the model: where they rest on n recent requests, they
count n / (n + FEW_SAMPLES). So a bad beginning is not believed for long, and whom nobody used is tried again.

The burden is what others pay: those who come later wait for work that need not have been done, and the copy it makes
drives somebody's prefix out of the cache, to be computed again. Without it every full moment scatters conversations,
which makes more work and fuller moments: on long prompts a cluster at 80 % of what it could do never recovers.
- What a second of work costs the others: everybody waits a second longer who comes to that node before it is idle
  again. With `line` prompts before it these are line * r / (1 - r) at load r, as many as come during the rest of a busy
  period of M/G/1; and r / (1 - r) is how many prompts an M/M/1 queue holds on the average, `crowd`. The 1 is for those
  who come while the work itself is done.
- What a copy drives out, computed or pulled, is asked for again about as often as anything that is asked for is found:
  `reuse`, the share of recent prompts that somebody held. On long prompts that come again a cluster that takes copies
  for free has each prefix several times, and most of them nowhere; where little comes again, copies are cheap.
So an idle node copies readily, whoever stands in line elsewhere; where all have lines nobody does what is superfluous.

Rules against herding (every entry sees the same vectors, and all of them are old)
1. A gossiped number is corrected by what this node did since it was true, and trusted by its age: half of it
   after a half-life, the rest is what is typical.
2. With more than FEW candidates only some contend: this node, the best holders of the prefix, and of DRAWN random
   others the SAMPLE with the shortest queue (prompts, and requests beyond its slots) as far as this node knows. More
   draws find an idle node more often, and so do all other entries at once: so a small cluster draws fewer, and the
   target has the last word (4).
3. Near ties are broken at random, except that this node keeps a request which it would do as well as any, and
   that nobody pulls to be only as good as one who need not.
4. The target decides on its live state whether it admits, and whether its queue is what we took it for; see
   `node.decide`.

Sources: SMG's least_load (queued tokens over throughput, k/(1-k)), Dynamo (prefill left after overlap), best of
two choices with own sends (shared notes on routing). The price of work is the externality of a customer in a queue that
is served in order (Haviv and Ritov, "Externalities, tangible externalities, and queue disciplines", 1998).
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter

from node.policy.base import CandidateCost, Choice, Question
from node.policy.best_pull import NO_PULL, best_pull
from node.policy.explore import explored
from node.policy.pull import PullModel
from node.policy.times import PRIOR_REQUEST_MS, times_of
from node.view import Candidate, Unseen

#: Requests computed at once by an engine that does not tell.
PRIOR_SLOTS = 256


@dataclass(frozen=True, slots=True)
class CostConfig:
    """Constants of the formula. Defaults are for engines between a laptop and a data centre."""

    #: Seconds after which half of a gossiped number is trusted: many gossip intervals, since the target checks it.
    half_life_s: float = 8.0
    #: The same for requests in its slots, which pass from one to another faster. Two or three gossip intervals.
    active_half_life_s: float = 2.0
    #: Samples of which half is believed.
    few_samples: float = 10.0
    #: Up to so many candidates all contend; beyond, so many of the random ones that were drawn, and holders, do.
    few: int = 8
    sample: int = 2
    #: So many are drawn for it, but at most one node in so many: in a small cluster all entries would see the same.
    drawn: int = 8
    drawn_one_in: int = 12
    holders: int = 3
    #: Up to so many candidates every cost is worked out, to be shown; beyond, those of the contenders.
    show: int = 16
    #: Sources weighed per candidate, those with the longest prefix first.
    sources: int = 3
    #: Costs so close to the lowest count as equal: milliseconds, and share of the work before the first token.
    tie_ms: float = 2.0
    tie_share: float = 0.05
    #: How much longer the target's queue may be than known, beyond what makes the second best as good: milliseconds.
    patience_ms: float = 20.0
    #: Share of the decoding time that counts against the time to the first token.
    decode_share: float = 0.25
    #: Gaps by which each active request delays ours.
    active_share: float = 2.0
    #: Share of a request's time that a half full cache costs: who waits for room waits for others to end.
    barrier_share: float = 0.03
    #: KV use is cut off here, so that the barrier stays finite.
    barrier_top: float = 0.98


class Cost:
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
        most = max(question.matched_tokens.values(), default=0)
        costs = {
            candidate.name: self._cost(candidate, question, holders, most, now)
            for candidate in (everyone if show_all else contenders)
        }
        chosen = self._pick([costs[candidate.name] for candidate in contenders], contenders, rng)
        ranked = tuple(sorted(costs.values(), key=_total_ms))
        patience_ms = self._patience_ms(chosen, ranked)
        if holders and chosen.source is None and question.commit and rng.random() < self.pull.explore_share:
            tried = explored(chosen, question, holders, self.pull, few=self.config.few_samples)
            if tried is not None:
                ranked = tuple(tried if cost is chosen else cost for cost in ranked)
                reason = f"try {tried.source_chunks} chunks from {tried.source}"
                return Choice(tried, reason, ranked, patience_ms)
        return Choice(chosen, _reason(chosen, len(everyone)), ranked, patience_ms)

    def cost_of(self, candidate: Candidate, question: Question, now: float) -> CandidateCost:
        """The terms of one candidate."""
        most = max(question.matched_tokens.values(), default=0)
        return self._cost(candidate, question, self._holders(question), most, now)

    def _patience_ms(self, chosen: CandidateCost, ranked: tuple[CandidateCost, ...]) -> float:
        """Until when nobody else is better: its queue as it is known, and what the next one costs more."""
        if len(ranked) < 2:
            return 0.0
        other = ranked[1] if ranked[0] is chosen else ranked[0]
        return chosen.queue_ms + max(0.0, other.total_ms - chosen.total_ms) + self.config.patience_ms

    def _contenders(self, question: Question, rng: random.Random) -> list[Candidate]:
        everyone = question.candidates
        if len(everyone) <= self.config.few:
            return list(everyone)
        matched = question.matched_tokens
        certain = _certain(everyone, matched if question.near is None else question.near)
        if len(certain) > self.config.holders + 1:
            certain.sort(key=lambda candidate: (candidate.is_self, matched.get(candidate.name, 0)), reverse=True)
            del certain[self.config.holders + 1 :]
        return certain + self._drawn(question, {candidate.name for candidate in certain}, rng)

    def _drawn(self, question: Question, names: set[str], rng: random.Random) -> list[Candidate]:
        """Random others than `names`, those with the shortest queues."""
        everyone, unseen, config = question.candidates, question.unseen, self.config
        count = max(config.sample, min(config.drawn, len(everyone) // config.drawn_one_in))
        nothing = _NOTHING
        drawn: list[tuple[float, int, Candidate]] = []
        # Draws instead of a shuffle: the cluster may have a thousand nodes.
        for turn in range(4 * count):
            candidate = everyone[int(rng.random() * len(everyone))]
            name = candidate.name
            if name not in names:
                names.add(name)
                load, since = candidate.load, unseen.get(name, nothing)
                queue_ms = load.queued_ms + since.sent_ms
                slots = load.slots or PRIOR_SLOTS
                beyond = load.running + load.waiting + since.sent - since.finished + 1 - slots
                if beyond > 0:
                    queue_ms += beyond * (load.e2e_p50_ms or PRIOR_REQUEST_MS) / slots
                drawn.append((queue_ms, turn, candidate))
                if len(drawn) == count:
                    break
        drawn.sort()
        return [candidate for _, _, candidate in drawn[: config.sample]]

    def _pick(self, costs: list[CandidateCost], contenders: list[Candidate], rng: random.Random) -> CandidateCost:
        best = min(costs, key=_total_ms)
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

    def _cost(
        self, candidate: Candidate, question: Question, holders: list[Candidate], most: int, now: float
    ) -> CandidateCost:
        load, typical, config = candidate.load, question.typical, self.config
        prefill, gap_ms, request_ms = times_of(load, typical, config.few_samples)
        name = candidate.name
        age_s = max(0.0, now - candidate.as_of)
        trust = 1.0 if candidate.is_self else 0.5 ** (age_s / config.half_life_s)
        since = question.unseen.get(name, _NOTHING)
        left_ms = (load.queued_ms if load.prefill.measured else prefill.ms(0, load.queued_tokens)) - age_s * 1000
        queue_ms = (trust * left_ms if left_ms > 0 else 0.0) + (1 - trust) * typical.queued_ms + since.sent_ms
        line = trust * load.prompts + (1 - trust) * typical.prompts + since.sent
        seen = load.running + load.waiting - since.finished
        if not candidate.is_self:
            trust = 0.5 ** (age_s / config.active_half_life_s)
        active = (trust * seen if seen > 0 else 0.0) + (1 - trust) * typical.active + since.sent
        slots = load.slots or PRIOR_SLOTS
        beyond = active + 1 - slots
        held = question.matched_tokens.get(name, 0)
        info = candidate.models.get(question.model)
        pull = best_pull(self.pull, candidate, question, holders, held=held, prefill=prefill) if holders else NO_PULL
        cached = held + pull.tokens
        hop_ms = candidate.hop_ms
        if beyond > 0:
            # After a refusal: another one would send the request into the line, while a slot stands free elsewhere.
            queue_ms = max(queue_ms, beyond * request_ms / slots) + (request_ms if question.refused else 0.0)
        if info is not None and info.kv_tokens and load.kv_use > 0:
            # An engine begins a prompt when all of it has room: those who run give back what they hold as they end.
            lacking = load.kv_use + question.prompt_tokens / info.kv_tokens - 1
            if lacking > 0:
                queue_ms += request_ms * min(1.0, lacking / load.kv_use)
        prefill_ms = prefill.ms(cached, question.prompt_tokens - cached)
        decode_ms = gap_ms * (config.decode_share * question.output_tokens + config.active_share * active)
        use = min(config.barrier_top, load.kv_use)
        barrier_ms = config.barrier_share * request_ms * use / (1 - use)
        again_ms = copied_ms = 0.0
        if most > cached:
            again_ms = prefill_ms - prefill.ms(most, question.prompt_tokens - most)
        if pull.tokens:
            copied_ms = prefill.ms(held, question.prompt_tokens - held) - prefill_ms
        superfluous_ms = again_ms + question.reuse * (again_ms + copied_ms)
        burden_ms = (1 + line * typical.prompts) * superfluous_ms if superfluous_ms > 0 else 0.0
        return CandidateCost(
            name,
            hop_ms + queue_ms + pull.ms + prefill_ms + decode_ms + barrier_ms + burden_ms,
            hop_ms,
            queue_ms,
            pull.ms,
            prefill_ms,
            decode_ms,
            barrier_ms,
            burden_ms,
            held,
            pull.tokens,
            question.matched_chunks.get(name, 0),
            pull.source,
            pull.chunks,
            age_s * 1000,
            pull.helpers,
        )


_total_ms = attrgetter("total_ms")
_NOTHING = Unseen()


def _certain(everyone: tuple[Candidate, ...], holders: Collection[str]) -> list[Candidate]:
    """This node and those who hold part of the prompt, in their order."""
    if not holders:
        first = everyone[0]  # a roster names this node first
        return [first] if first.is_self else [candidate for candidate in everyone if candidate.is_self]
    return [candidate for candidate in everyone if candidate.name in holders or candidate.is_self]


def _reason(cost: CandidateCost, candidates: int) -> str:
    if cost.source is not None:
        return f"pull {cost.source_chunks} chunks from {cost.source}"
    if cost.matched_chunks:
        return f"prefix {cost.matched_chunks} chunks"
    return "least cost" if candidates > 1 else "only candidate"
