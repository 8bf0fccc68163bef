"""The oracle: one central router that knows everything, at once and exactly.

For every node it works out the time to the first token from the engine's true state: the rest of the step that is
running, the prompts before ours at the engine's true speed, what of ours is really cached there, or the true time of
pulling what another node has. It takes the least. It is greedy: it does not know the future.
"""

from __future__ import annotations

from benches.simcluster import SimCluster
from benches.simnode import Request, SimNode
from benches.traces import BLOCK_TOKENS


def oracle(cluster: SimCluster, request: Request, now: float) -> tuple[int, int | None]:
    """The node that would answer first."""
    keys, tokens = request.arrival.blocks, request.arrival.tokens
    limit = min(len(keys), (tokens - 1) // BLOCK_TOKENS)
    held = [node.engine.cache.match(keys, limit) for node in cluster.nodes]
    most = max(held)
    best: tuple[float, float, int, int | None] | None = None
    for node in cluster.nodes:
        prefill = node.config.timing.prefill
        waits = ahead(node, now)
        have = held[node.number]
        if best is not None and waits > best[0]:
            continue  # too late whatever it holds
        options: list[tuple[float, int | None]] = [(prefill(have * BLOCK_TOKENS, tokens - have * BLOCK_TOKENS), None)]
        if most > have:
            source = held.index(most)
            seconds = pull_seconds(cluster, cluster.nodes[source], most - have, now)
            rest = prefill(most * BLOCK_TOKENS, tokens - most * BLOCK_TOKENS)
            # The pull goes on while others compute.
            options.append((max(seconds - waits, 0.0) + rest, source))
        seconds, source_or_none = min(options, key=lambda option: option[0])
        found = (waits + seconds, len(node.requests), node.number, source_or_none)
        if best is None or found[:2] < best[:2]:
            best = found
    assert best is not None
    request.predicted = held[best[2]] * BLOCK_TOKENS
    return best[2], best[3]


def ahead(node: SimNode, now: float) -> float:
    """Seconds of prompts that will be computed before one that arrives now."""
    timing = node.config.timing
    seconds = 0.0
    for rid in node.prompts:
        sequence = node.engine.sequence(rid)
        if sequence.emitted == 0:
            computed = sequence.computed or node.engine.cached(sequence)
            seconds += timing.prefill(computed, sequence.job.prompt_tokens - computed)
    return seconds + max(0.0, node.engine.step_left(now))


def pull_seconds(cluster: SimCluster, source: SimNode, blocks: int, now: float) -> float:
    """Seconds that pulling so many blocks would take."""
    world = cluster.world
    size = blocks * BLOCK_TOKENS * world.engine.kv_token_bytes
    begin = max(now + world.pull.lookup_ms / 1000, source.link_free)
    return begin - now + size / world.net_bytes_s + size / world.memory_bytes_s + world.rtt_s
