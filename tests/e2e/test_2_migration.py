"""A prompt is computed once in the cluster: routed to where its blocks are, or its blocks are moved."""

from pathlib import Path

import aiohttp
import pytest

from kvmigrate.reader import PoolReader
from tests.e2e.client import NAMES, OPERATOR, Client, prose

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG_WORDS = 2200
"""About 3,000 tokens."""


def others(name: str) -> list[str]:
    return [other for other in NAMES if other != name]


async def reset_engine_cache(client: Client, name: str) -> None:
    """Empty the engine's own prefix cache, so that the pool is what is left."""
    socket = (await client.state(name))["engine"]["address"].removeprefix("unix:")
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=socket)) as engine,
        engine.post("http://engine/reset_prefix_cache") as response,
    ):
        assert response.status == 200


async def flip_bits(client: Client, name: str) -> None:
    """Flip one bit in each block of a node's pool, as a bad memory cell would; a second call mends them again."""
    pool = PoolReader(Path((await client.state(name))["kv"]["path"]), writable=True)
    geometry = pool.file.geometry
    with pool.path.open("r+b") as file:
        for slot in range(geometry.slots):
            if pool.header(slot).valid:
                file.seek(geometry.slot_offset(slot) + geometry.block_bytes // 2)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 1]))
    pool.close()


async def test_a_shared_prefix_goes_to_its_holder_from_any_entry(client: Client) -> None:
    document = prose(1, 700)
    first = await client.complete("red", document + "\nFirst question:")
    for entry in NAMES:
        prompt = f"{document}\nQuestion of {entry}:"
        await client.would_send(entry, prompt, first.target)
        reply = await client.complete(entry, prompt)
        assert reply.target == first.target
        assert "prefix" in reply.headers["x-grapevine-reason"]


async def test_a_pulled_prompt_starts_in_a_quarter_of_a_cold_prefill_with_the_same_answer(client: Client) -> None:
    holder, puller = "green", "blue"
    at_holder, at_puller = {"x-grapevine-force-target": holder}, {"x-grapevine-force-target": puller}
    cold_there = await client.complete(puller, prose(2, LONG_WORDS), headers={**at_puller, "x-grapevine-no-pull": "1"})
    prompt = prose(3, LONG_WORDS)
    await client.complete("red", prompt, headers=at_holder)
    local = await client.complete("red", prompt, headers=at_holder)
    await client.knows_holder("red", prompt, holder)
    cached = await client.metric(puller, "grapevine_actual_cached_tokens_total")
    pulled = await client.complete("red", prompt, headers={**at_puller, "x-grapevine-force-source": holder, **OPERATOR})
    assert pulled.target == puller
    assert pulled.headers["x-grapevine-source"] == holder
    assert pulled.pulled >= 20
    assert pulled.text == local.text
    risen = await client.metric(puller, "grapevine_actual_cached_tokens_total") - cached
    assert risen == pulled.pulled * 128
    print(
        f"cold {cold_there.first_token_s:.2f} s, local {local.first_token_s:.2f} s, pulled {pulled.first_token_s:.2f} s"
    )
    assert pulled.first_token_s < cold_there.first_token_s / 4


async def test_a_node_that_lacks_the_prefix_pulls_it_without_being_told_when_that_is_cheaper(client: Client) -> None:
    prompt = prose(4, 1500)
    await client.complete("red", prompt, headers={"x-grapevine-force-target": "red"})
    await client.knows_holder("green", prompt, "red")
    reply = await client.complete("green", prompt, headers={"x-grapevine-force-target": "green"})
    assert reply.headers.get("x-grapevine-source") == "red"
    assert reply.pulled > 5


async def test_a_damaged_block_at_the_source_is_noticed_counted_and_recomputed(client: Client) -> None:
    prompt = prose(5, 900)
    local = await client.complete("red", prompt, headers={"x-grapevine-force-target": "red"})
    await client.knows_holder("red", prompt, "red")
    before = (await client.state("green"))["kv"]["corrupt"]
    await flip_bits(client, "red")
    reply = await client.complete(
        "red", prompt, headers={"x-grapevine-force-target": "green", "x-grapevine-force-source": "red", **OPERATOR}
    )
    assert (reply.status, reply.pulled, reply.error) == (200, 0, "")
    assert reply.text == local.text
    assert (await client.state("green"))["kv"]["corrupt"] > before
    await flip_bits(client, "red")


async def test_a_damaged_block_in_the_engines_own_pool_is_noticed_counted_and_recomputed(client: Client) -> None:
    prompt = prose(6, 900)
    here = {"x-grapevine-force-target": "blue", "x-grapevine-no-pull": "1"}
    first = await client.complete("blue", prompt, headers=here)
    await reset_engine_cache(client, "blue")
    cached = await client.metric("blue", "grapevine_actual_cached_tokens_total")
    from_pool = await client.complete("blue", prompt, headers=here)
    assert await client.metric("blue", "grapevine_actual_cached_tokens_total") > cached, "the pool was not used"
    assert from_pool.text == first.text
    await reset_engine_cache(client, "blue")
    before = (await client.state("blue"))["kv"]["corrupt"]
    await flip_bits(client, "blue")
    damaged = await client.complete("blue", prompt, headers=here)
    assert damaged.text == first.text
    assert (await client.state("blue"))["kv"]["corrupt"] > before
    await flip_bits(client, "blue")


@pytest.mark.parametrize("field", ["kv_transfer_params"])
async def test_a_client_cannot_name_a_source_itself(client: Client, field: str) -> None:
    body = {
        "model": "SmolLM2-135M-Instruct", "prompt": "Hello", "max_tokens": 4,
        field: {"grapevine": {"rid": "forged"}, "remote_host": "192.0.2.1"},
    }  # fmt: skip
    async with client.session.post(client.cluster["red"].url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
