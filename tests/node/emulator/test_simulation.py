"""The simulated cluster: nothing is lost, hits are really there, and what knows more does better."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from benches import traces
from benches.oracle import oracle
from benches.outcome import Outcome, engine_config, outcome
from benches.simcluster import Grapevine, Placing, SimCluster, World
from benches.traces import BLOCK_TOKENS, Arrival

from node.policy import make_policy
from node.policy.cost import Cost

TRACE = traces.made_up(400, rate=2.0)
WORLD = World(nodes=8, engine=engine_config(TRACE, 0.7), delay_s=0.25, digest_s=0.5)


def play(placing: Placing, world: World = WORLD) -> tuple[SimCluster, Outcome]:
    cluster = SimCluster(world, placing)
    found = outcome(cluster.run(TRACE), cluster)
    for node in cluster.nodes:
        node.engine.validate()
        node.sends.validate()
    cluster.index.validate()
    return cluster, found


def test_every_request_is_done_once_and_a_hit_was_begun_before() -> None:
    cluster, _ = play(Grapevine(Cost(pull=WORLD.pull)))
    assert sorted(request.rid for request in cluster.finished) == sorted(f"r{number}" for number in range(len(TRACE)))
    seen: dict[int, float] = {}
    for request in cluster.finished:
        for block in request.arrival.blocks:
            seen[block] = min(seen.get(block, 1e9), request.started)
    for request in cluster.finished:
        assert request.arrival.at < request.started < request.first <= request.done
        for block in request.arrival.blocks[: request.cached // BLOCK_TOKENS]:
            assert seen[block] < request.started


def test_who_sees_prefixes_hits_more_than_who_does_not_and_the_oracle_is_fastest() -> None:
    _, ours = play(Grapevine(Cost(pull=WORLD.pull)))
    _, turns = play(Grapevine(make_policy("round_robin")))
    _, best = play(oracle)
    assert ours.hit_ratio > 1.5 * turns.hit_ratio
    assert best.ttft_mean < turns.ttft_mean and ours.ttft_mean < turns.ttft_mean
    assert ours.imbalance < 2


def test_the_same_seed_gives_the_same_run() -> None:
    assert play(Grapevine(make_policy("cost")))[1] == play(Grapevine(make_policy("cost")))[1]


def test_copies_share_the_first_block_only_and_keep_the_rate() -> None:
    three = traces.copies(TRACE, 2.5, seconds=1e9)
    assert len(three) == pytest.approx(2.5 * len(TRACE), rel=0.1)
    assert [arrival for arrival in three if arrival in TRACE]
    blocks = [set(arrival.blocks) for arrival in three]
    assert all(0 in some for some in blocks)
    assert [arrival.at for arrival in three] == sorted(arrival.at for arrival in three)


def test_requests_of_one_tick_are_spread_over_it() -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": at, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]} for at in (0, 0, 3000)
    ]
    assert traces._spread(rows) == [Arrival(at, 1100, 5, (0, 1)) for at in (0.0, 1.5, 3.0)]


def test_sessions_have_their_long_pauses_cut_and_their_blocks_joined() -> None:
    requests = [
        {"t": 0.0, "in": 1100, "out": 7, "runs": [[1, 17]]},
        {"t": 900.0, "in": 1200, "out": 7, "runs": [[1, 8], [40, 10]]},
    ]
    first, second = traces._sessions(iter([{"requests": requests}]), random.Random(1), math.inf)
    assert second.at - first.at == traces.MAX_PAUSE_S
    assert len(first.blocks) == len(second.blocks) == 2
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]


def hot_prefix(requests: int, shared: int, rate: float) -> list[Arrival]:
    """Every prompt begins with the same blocks, and ends with one of its own."""
    rng, at, arrivals = random.Random(5), 0.0, []
    for number in range(requests):
        at += rng.expovariate(rate)
        blocks = (*range(shared), 1_000_000 + number)
        arrivals.append(Arrival(at, len(blocks) * BLOCK_TOKENS + 100, 20, blocks))
    return arrivals


def test_a_prefix_that_every_prompt_shares_spreads_over_the_nodes_before_its_first_holder_drowns() -> None:
    """Affinity alone would send everything to one node, which cannot take it all."""
    trace = hot_prefix(400, 16, rate=16.0)
    config = WORLD.engine
    one = config.timing.prefill(16 * BLOCK_TOKENS, BLOCK_TOKENS + 100)
    assert 16.0 * one > 1.0  # more than one node can take, though its prefix is cached
    cluster = SimCluster(WORLD, Grapevine(Cost(pull=WORLD.pull)))
    found = outcome(cluster.run(trace), cluster)
    holders = [node for node in cluster.nodes if all(block in node.engine.cache for block in range(16))]
    central = SimCluster(WORLD, oracle)
    best = outcome(central.run(trace), central)
    assert len(holders) >= 4 and found.hit_ratio > 0.85 and found.imbalance < 1.2
    assert found.ttft_mean < 1.3 * best.ttft_mean
    # Each node computes it at most once, all of them at the very beginning.
    assert sum(request.cached < 16 * BLOCK_TOKENS for request in cluster.finished) <= WORLD.nodes


def test_one_block_that_every_prompt_shares_does_not_glue_them_to_one_node() -> None:
    trace = hot_prefix(400, 1, rate=16.0)
    cluster = SimCluster(WORLD, Grapevine(Cost(pull=WORLD.pull)))
    cluster.run(trace)
    counts = Counter(request.target for request in cluster.finished)
    assert len(counts) == WORLD.nodes and max(counts.values()) < 1.5 * len(trace) / WORLD.nodes


#: Room for 128 blocks a node, so that a few minutes of other work pass through it.
SMALL = replace(WORLD, engine=replace(WORLD.engine, kv_tokens=1 << 16, max_model_len=1 << 14))
SHARED = 8


def holders(cluster: SimCluster) -> int:
    return sum(all(block in node.engine.cache for block in range(SHARED)) for node in cluster.nodes)


def cooling(hot: int, cold: int) -> list[Arrival]:
    """A prefix that is asked for 16 times a second, then every 20 s among prompts that nobody repeats."""
    trace = hot_prefix(hot, SHARED, rate=16.0)
    rng, at = random.Random(6), trace[-1].at
    for number in range(cold):
        at += rng.expovariate(4.0)
        own = tuple(range(2_000_000 + 12 * number, 2_000_000 + 12 * (number + 1)))
        blocks = (*range(SHARED), own[0]) if number % 80 == 0 else own
        trace.append(Arrival(at, len(blocks) * BLOCK_TOKENS + 100, 20, blocks))
    return trace


def test_copies_of_a_prefix_that_cooled_down_give_way_to_what_is_used() -> None:
    hot = SimCluster(SMALL, Grapevine(Cost(pull=SMALL.pull)))
    hot.run(cooling(300, 0))
    spread = holders(hot)
    assert spread >= 6
    later = SimCluster(SMALL, Grapevine(Cost(pull=SMALL.pull)))
    later.run(cooling(300, 1200))
    assert holders(later) <= 2
    # What its last users left is all that the others know of, and nobody computes it more often than it is lost.
    later.now += later.world.digest_s
    told = [name for name, blocks in later.index.longest(range(SHARED)).items() if blocks == SHARED]
    assert len(told) <= 2
