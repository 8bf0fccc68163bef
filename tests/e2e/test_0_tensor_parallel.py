"""Two nodes whose engines compute on two ranks each, with a small model of random weights: blocks are kept by rank.

They run before the cluster of the other tests is started.
"""

import tempfile
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
import randommodel
from localcluster import LocalCluster

from tests.e2e.client import OPERATOR, Client, prose
from tests.e2e.pools import PoolBytes, reset_engine_cache

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEFT, RIGHT = "left", "right"
BLOCK_TOKENS = 128
RANKS = 2
WORDS = 900
"""About 1,000 tokens, seven whole blocks."""
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
                "--tensor-parallel-size", str(RANKS), *randommodel.ENGINE_ARGS,
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
