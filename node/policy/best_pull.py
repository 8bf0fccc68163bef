"""From whom a candidate would pull the beginning of a prompt, who would help, and how long that takes.

Other holders of the prefix help where the target will ask them: the same ones (`node.kv_sources`), by the same rule
(`kvmigrate.sharing`). Rates count in full, as if no link were shared. Where the target's own link is what is slow, each
source is measured at its part of it, and the parts sum up to it again: a source alone would then be taken for slower
than it is, and one that was only measured alone makes the first few pulls beside others seem faster than they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvmigrate.sharing import Giver, helpers
from node.kv_sources import further
from node.policy.base import Question
from node.policy.pull import PullModel
from node.prefill import PrefillTime
from node.view import Candidate

#: Sources that differ by less are as good: far below what anybody notices, far above what rounding does.
SAME_MS = 1e-6


class BestPull(NamedTuple):
    """The source, the tokens that come, milliseconds, chunks of the prompt up to there, and who helps."""

    source: str | None = None
    tokens: int = 0
    ms: float = 0.0
    chunks: int = 0
    helpers: tuple[str, ...] = ()


NO_PULL = BestPull()


class Way(NamedTuple):
    """From a source to a target: tokens that it could give, round trip in milliseconds, bytes per second."""

    name: str
    tokens: int
    rtt_ms: float
    net: float

    def worse(self, others: Iterable[Way]) -> bool:
        """Whether one of these can give as much, faster, and is no further: then this one may help, and no more."""
        for _, tokens, rtt_ms, net in others:
            if net > self.net and tokens >= self.tokens and rtt_ms <= self.rtt_ms:
                return True
        return False


def best_pull(
    pull: PullModel,
    candidate: Candidate,
    question: Question,
    holders: Sequence[Candidate],
    *,
    held: int,
    prefill: PrefillTime,
) -> BestPull:
    """The source that saves most, or none. `holders` come longest first; the candidate holds `held` tokens itself."""
    info, forced = candidate.models.get(question.model), question.force_source
    if info is None or not info.fingerprint or not info.kv_token_bytes:
        return NO_PULL
    best, saved, token_bytes = NO_PULL, 0.0, info.kv_token_bytes
    fixed, token, pair = prefill
    memory = candidate.load.copy_rate or pull.memory
    least_ms = pull.lookup_ms + pull.step_ms
    ways: dict[str, Way] | None = None
    for source in holders:
        extra = question.giving_tokens.get(source.name, 0) - held
        if extra <= 0:
            break
        if forced is not None and source.name != forced:
            continue
        # `prefill.ms`, `pull.pull_ms` and `pull.pays`, written out: this is done for every pair of two nodes.
        recompute_ms = fixed + extra * (token + pair * (held + extra / 2)) - fixed
        limit_ms = pull.margin * recompute_ms if forced is None else math.inf
        if forced is None and (recompute_ms <= saved or least_ms >= limit_ms):
            break  # nobody behind can save as much; it would not pay on the fastest network
        if ways is None:
            ways = _ways(pull, candidate, question, holders, held)
            together = sum(sorted([way.net for way in ways.values()])[-1 - pull.more :])
            begin_ms = pull.lookup_ms + min([way.rtt_ms for way in ways.values()], default=0.0)
        way = ways.get(source.name)
        if way is None or (forced is None and way.worse(ways.values())):
            continue
        nbytes = extra * token_bytes
        rest_ms = pull.lookup_ms + way.rtt_ms + nbytes / memory * 1000 + pull.step_ms
        net_ms, helping = nbytes / way.net * 1000, NO_PULL.helpers
        if len(ways) > 1 and net_ms > begin_ms:
            # Not shorter than this, with everybody's help: mostly it is seen here that it cannot matter.
            shortest_ms = rest_ms + (nbytes * 1000 + (together - way.net) * begin_ms) / together
            if forced is not None or (shortest_ms < limit_ms and recompute_ms - shortest_ms > saved + SAME_MS):
                helping, net_ms = shared(pull, way, ways, token_bytes)
        pull_ms = rest_ms + net_ms
        if pull_ms < limit_ms and (forced is not None or recompute_ms - pull_ms > saved + SAME_MS):
            saved = recompute_ms - pull_ms
            best = BestPull(source.name, extra, pull_ms, question.giving_chunks.get(source.name, 0), helping)
    return best


def shared(pull: PullModel, way: Way, ways: Mapping[str, Way], token_bytes: int) -> tuple[tuple[str, ...], float]:
    """Who of `ways` would help the source of `way`, and the milliseconds that the network then takes."""
    more = further(
        {other.name: other.tokens for other in ways.values()},
        target="",
        source=way.name,
        reach=way.tokens,
        rate=lambda name: ways[name].net,
        tie=_same,
        most=pull.more,
    )
    others = []
    for name, tokens in more.items():
        _, _, rtt_ms, net = ways[name]
        others.append(Giver(net, tokens * token_bytes, (pull.lookup_ms + rtt_ms) / 1000))
    chosen, seconds = helpers(Giver(way.net, way.tokens * token_bytes), others)
    if not chosen:
        return (), seconds * 1000
    names = list(more)
    return tuple([names[place] for place in chosen]), seconds * 1000


def _ways(
    pull: PullModel, candidate: Candidate, question: Question, holders: Sequence[Candidate], held: int
) -> dict[str, Way]:
    """How blocks would come to a candidate from those holders that have some for it."""
    model, giving, load = question.model, question.giving_tokens, candidate.load
    fingerprint, ways = candidate.models[model].fingerprint, {}
    for source in holders:
        name = source.name
        extra = giving.get(name, 0) - held
        theirs = source.models.get(model)
        if extra <= 0 or name == candidate.name:
            continue
        if theirs is None or theirs.fingerprint != fingerprint or not source.exchanges_kv_with(candidate):
            continue
        rtt = load.rtts.get(name)
        if rtt is None:
            rtt = source.hop_ms if candidate.is_self else candidate.hop_ms
        ways[name] = Way(name, extra, rtt, load.rates.get(name) or pull.guess(question.typical.net, rtt))
    return ways


def _same(name: str) -> int:
    """Which of those that are as good is asked makes no difference to the time."""
    return 0
