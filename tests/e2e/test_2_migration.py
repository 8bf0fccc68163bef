"""A prompt is computed once in the cluster: routed to where its blocks are, or its blocks are moved."""

import asyncio
import signal

import pytest

from node.flows import pulled_from
from tests.e2e.client import NAMES, OPERATOR, Client, prose, until
from tests.e2e.pools import PoolBytes, reset_engine_cache
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG_WORDS = 2200
"""About 3,000 tokens."""


def others(name: str) -> list[str]:
    return [other for other in NAMES if other != name]


async def flip_bits(client: Client, name: str) -> None:
    """Flip one bit in each block of a node's pool; a second call mends them again."""
    pool = await PoolBytes.of(client, name)
    pool.flip_all()
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


async def test_a_pulled_prompt_is_not_computed_again_and_has_the_answer_of_a_local_hit(client: Client) -> None:
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


async def test_what_one_of_two_holders_has_damaged_comes_from_the_other(client: Client) -> None:
    """The last block of the first one is bad: however fast it is, the other one has to give that.

    And all of it, where the first one is late with every run: on a busy machine that happens.
    """
    prompt = prose(11, LONG_WORDS)
    at_red, at_blue = {"x-grapevine-force-target": "red"}, {"x-grapevine-force-target": "blue"}
    await client.complete("red", prompt, headers=at_red)
    local = await client.complete("red", prompt, headers=at_red)
    await client.knows_holder("blue", prompt, "red")
    from_red = {"x-grapevine-force-source": "red", **OPERATOR}
    assert (await client.complete("blue", prompt, headers={**at_blue, **from_red})).pulled >= 20
    for holder in ("red", "blue"):
        await client.knows_holder("green", prompt, holder)
    pool = await PoolBytes.of(client, "red")
    pool.flip(list(pool.blocks().values())[-1])
    pool.close()
    before = {name: await blocks_served(client, name) for name in ("red", "blue")}
    reply = await client.complete("green", prompt, headers={"x-grapevine-force-target": "green", **from_red})
    assert (reply.text, reply.pulled >= 20) == (local.text, True)
    given = pulled_from(reply.headers["x-grapevine-pulled-from"])
    assert "blue" in given and given.keys() <= {"red", "blue"} and sum(given.values()) == reply.pulled
    for name, blocks in given.items():
        assert await blocks_served(client, name) >= before[name] + blocks
    await at_rest(client, *NAMES)


async def blocks_served(client: Client, name: str) -> int:
    served = (await client.state(name))["kv"]["served"]
    return int(served["blocks"]) + int(served["pinned_blocks"])


async def test_a_node_that_lacks_the_prefix_pulls_it_without_being_told_when_that_is_cheaper(client: Client) -> None:
    prompt = prose(4, 1500)
    await client.complete("red", prompt, headers={"x-grapevine-force-target": "red"})
    await client.knows_holder("green", prompt, "red")
    await client.would_pull("green", prompt, target="green", source="red")
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


async def at_rest(client: Client, *names: str) -> None:
    """Until no engine holds a block for a request and no pool has a lease."""

    async def empty() -> bool:
        kv = [(await client.state(name))["kv"]["pool"] for name in names]
        use = [await client.metric(name, "vllm:kv_cache_usage_perc") for name in names]
        return not any(use) and not any(pool["leases"] or pool["partial"] for pool in kv)

    await until(empty, PATIENCE_S, "engines and pools have given everything back")


async def test_a_source_that_is_stopped_costs_its_deadline_and_nobody_else_anything(client: Client) -> None:
    prompt, node = prose(9, 900), client.cluster["red"]
    local = await client.complete("red", prompt, headers={"x-grapevine-force-target": "red"})
    await client.knows_holder("green", prompt, "red")
    failed = sum((await client.state("green"))["kv"]["peers"].get("red", {"failures": {}})["failures"].values())
    said = node_log(client, "green").count("pull from red ended early")
    node.kill(signal.SIGSTOP)
    try:
        forced = {"x-grapevine-force-target": "green", "x-grapevine-force-source": "red", **OPERATOR}
        held = asyncio.create_task(client.complete("green", prompt, headers=forced))
        other = asyncio.create_task(client.complete("green", "Hello", max_tokens=2, headers=no_pull("green")))
        done, _ = await asyncio.wait({held, other}, return_when=asyncio.FIRST_COMPLETED)
        assert other in done, "a request that needs no pull waited for one that does"
        reply = await held
    finally:
        node.kill(signal.SIGCONT)
    assert (reply.status, reply.pulled, reply.error, reply.text) == (200, 0, "", local.text)
    peers = (await client.state("green"))["kv"]["peers"]
    assert sum(peers["red"]["failures"].values()) == failed + 1
    assert node_log(client, "green").count("pull from red ended early") == said + 1
    await at_rest(client, "green")

    async def back() -> bool:
        views = [await client.member(name, "red") for name in NAMES]
        return all(view is not None and view["state"] == "alive" for view in views)

    await until(back, PATIENCE_S, "all see the stopped node alive again")


async def test_clients_that_leave_while_blocks_are_pulled_or_loaded_leave_nothing_behind(client: Client) -> None:
    prompt = prose(10, 900)
    local = await client.complete("red", prompt, headers={"x-grapevine-force-target": "red"})
    await client.knows_holder("green", prompt, "red")
    forced = {"x-grapevine-force-target": "green", "x-grapevine-force-source": "red", **OPERATOR}
    for wait_s in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6):
        asking = asyncio.create_task(client.complete("green", prompt, headers=forced))
        await asyncio.wait({asking}, timeout=wait_s)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await at_rest(client, "green", "red")
        await reset_engine_cache(client, "green")
    reply = await client.complete("green", prompt, headers=forced)
    assert (reply.status, reply.text) == (200, local.text)


def no_pull(target: str) -> dict[str, str]:
    return {"x-grapevine-force-target": target, "x-grapevine-no-pull": "1"}


def node_log(client: Client, name: str) -> str:
    return client.cluster[name].log.read_text(errors="replace")


async def test_zeros_that_nobody_can_notice_change_the_answer(client: Client) -> None:
    """The negative control of the two tests above: the blocks' bytes do decide what the engine says."""
    prompt = prose(8, 900)
    here = {"x-grapevine-force-target": "blue", "x-grapevine-no-pull": "1"}
    pool = await PoolBytes.of(client, "blue")
    before = pool.blocks()
    first = await client.complete("blue", prompt, headers=here)
    fresh = {block: slot for block, slot in pool.blocks().items() if block not in before}
    for slot in fresh.values():
        pool.forge_zeros(slot)
    pool.close()
    await reset_engine_cache(client, "blue")
    forged = await client.complete("blue", prompt, headers=here)
    await reset_engine_cache(client, "blue")
    assert len(fresh) >= 6
    assert forged.text != first.text


@pytest.mark.parametrize("field", ["kv_transfer_params"])
async def test_a_client_cannot_name_a_source_itself(client: Client, field: str) -> None:
    body = {
        "model": "SmolLM2-135M-Instruct", "prompt": "Hello", "max_tokens": 4,
        field: {"grapevine": {"rid": "forged"}, "remote_host": "192.0.2.1"},
    }  # fmt: skip
    async with client.session.post(client.cluster["red"].url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
