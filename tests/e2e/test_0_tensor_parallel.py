"""Two nodes whose engines compute on two ranks each, with a small model of random weights: blocks are kept by rank.

The engines have few blocks, so that requests are preempted when several are long.

They run before the cluster of the other tests is started.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
import randommodel
from localcluster import LocalCluster

from tests.e2e.client import OPERATOR, Client, prose
from tests.e2e.pools import PoolBytes, reset_engine_cache
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEFT, RIGHT = "left", "right"
BLOCK_TOKENS = 128
RANKS = 2
WORDS = 900
"""About 1,000 tokens, seven whole blocks."""
ENGINE_BLOCKS = 24
"""Of 128 tokens, one of them vLLM's own."""
NO_PULL = {"x-grapevine-no-pull": "1"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(session: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    model = randommodel.make_model(tmp_path_factory.mktemp("model") / "tiny", randommodel.TINY)
    with tempfile.TemporaryDirectory(prefix="gv-") as run_dir:
        cluster = LocalCluster(
            tmp_path_factory.mktemp("pair"),
            (LEFT, RIGHT),
            args=(
                "--no-mdns", "--cluster", "pair", "--kv-pool-gib", "0.25", "--run-dir", run_dir, "--model", str(model),
            ),
            engine_args=(
                "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager",
                "--tensor-parallel-size", str(RANKS), "--num-gpu-blocks-override", str(ENGINE_BLOCKS),
                *randommodel.ENGINE_ARGS,
            ),
            env={"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        )  # fmt: skip
        try:
            await cluster.start_all()
            await cluster.wait_ready(session)
            yield Client(cluster, session, model="tiny")
        finally:
            await cluster.stop_all()


def here(name: str) -> dict[str, str]:
    return {"x-grapevine-force-target": name, **NO_PULL}


async def test_blocks_of_both_ranks_are_kept_and_load_again(pair: Client) -> None:
    prompt = prose(21, WORDS)
    first = await pair.complete(LEFT, prompt, headers=here(LEFT))
    assert (first.status, first.error) == (200, "")
    pool = (await pair.state(LEFT))["kv"]["pool"]
    assert (pool["ranks"], pool["partial"]) == (RANKS, 0)
    assert pool["blocks"] >= 6
    await reset_engine_cache(pair, LEFT)
    cached = await pair.metric(LEFT, "grapevine_actual_cached_tokens_total")
    again = await pair.complete(LEFT, prompt, headers=here(LEFT))
    assert again.text == first.text
    assert await pair.metric(LEFT, "grapevine_actual_cached_tokens_total") >= cached + 6 * BLOCK_TOKENS


async def test_a_pull_brings_the_blocks_of_every_rank(pair: Client) -> None:
    prompt = prose(22, WORDS)
    await pair.complete(LEFT, prompt, headers=here(LEFT))
    local = await pair.complete(LEFT, prompt, headers=here(LEFT))
    await pair.knows_holder(RIGHT, prompt, LEFT)
    cached = await pair.metric(RIGHT, "grapevine_actual_cached_tokens_total")
    pulled = await pair.complete(
        RIGHT, prompt, headers={"x-grapevine-force-target": RIGHT, "x-grapevine-force-source": LEFT, **OPERATOR}
    )
    assert pulled.pulled >= 6
    assert pulled.text == local.text
    assert await pair.metric(RIGHT, "grapevine_actual_cached_tokens_total") == cached + pulled.pulled * BLOCK_TOKENS
    pool = (await pair.state(RIGHT))["kv"]["pool"]
    assert (pool["partial"], pool["leases"]) == (0, 0)


async def test_a_prefix_counts_only_as_far_as_every_rank_has_it(pair: Client) -> None:
    prompt, intact = prose(23, WORDS), 2
    pool = await PoolBytes.of(pair, LEFT)
    before = pool.blocks(rank=1)
    first = await pair.complete(LEFT, prompt, headers=here(LEFT))
    fresh = [slot for block, slot in pool.blocks(rank=1).items() if block not in before]
    assert len(fresh) >= 6
    pool.flip(fresh[intact])
    pool.close()
    corrupt = (await pair.state(LEFT))["kv"]["corrupt"]
    await reset_engine_cache(pair, LEFT)
    cached = await pair.metric(LEFT, "grapevine_actual_cached_tokens_total")
    again = await pair.complete(LEFT, prompt, headers=here(LEFT))
    assert again.text == first.text
    assert await pair.metric(LEFT, "grapevine_actual_cached_tokens_total") == cached + intact * BLOCK_TOKENS
    kv = (await pair.state(LEFT))["kv"]
    assert (kv["corrupt"], kv["pool"]["partial"]) == (corrupt + 1, 0)


async def test_requests_that_are_preempted_have_the_answers_of_those_that_were_not(pair: Client) -> None:
    """Prompts of four blocks fit as long as they do not grow. Their blocks are pulled and loaded meanwhile."""
    wished = {"max_tokens": 300, "ignore_eos": True}
    prompts = [prose(40 + number, 400) for number in range(5)]
    alone = [await pair.complete(LEFT, prompt, headers=here(LEFT), **wished) for prompt in prompts]
    for prompt in prompts:
        await pair.knows_holder(RIGHT, prompt, LEFT)
    before = await counts(pair, RIGHT)
    pull = {"x-grapevine-force-target": RIGHT, "x-grapevine-force-source": LEFT, **OPERATOR}
    pull["x-request-timeout"] = str(PATIENCE_S)
    together = await asyncio.gather(*(pair.complete(RIGHT, prompt, headers=pull, **wished) for prompt in prompts))
    assert [(reply.status, reply.error, reply.text) for reply in together] == [(200, "", one.text) for one in alone]
    assert all(reply.pulled >= 3 for reply in together)
    preempted, ended, tokens, in_use = (now - was for now, was in zip(await counts(pair, RIGHT), before, strict=True))
    print(f"{preempted:.0f} preemptions, all was said after {max(reply.times[-1] for reply in together):.1f} s")
    assert preempted >= 1
    assert (ended, tokens, in_use) == (len(prompts), len(prompts) * wished["max_tokens"], 0), "each once and whole"
    for name in (LEFT, RIGHT):
        pool = (await pair.state(name))["kv"]["pool"]
        assert (pool["leases"], pool["partial"], pool["expired_leases"]) == (0, 0, 0)
        assert pool["free"] + pool["granted"] + RANKS * pool["blocks"] == pool["slots"]


async def counts(pair: Client, name: str) -> list[float]:
    """What the engine of a node counted: preemptions, requests that ended, tokens; and the share of blocks in use."""
    names = ("num_preemptions_total", "request_success_total", "generation_tokens_total", "kv_cache_usage_perc")
    return [await pair.metric(name, f"vllm:{one}") for one in names]
