"""Nodes and engines die; the others go on, and what comes back is the same node again."""

import asyncio
import signal
import time
from typing import Any

import psutil
import pytest
from localcluster import ENGINE_START_LIMIT_S

from tests.e2e.client import Client, prose, until
from tests.e2e.pools import reset_engine_cache
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUIET_S = 12.0
"""How long clients keep asking after the kill: longer than a death may stay unnoticed."""


def engine_processes(node_pid: int) -> list[psutil.Process]:
    return psutil.Process(node_pid).children(recursive=True)


async def test_killing_a_node_costs_only_what_it_was_running_and_it_comes_back_under_its_name(client: Client) -> None:
    victim = client.cluster["blue"]
    assert victim.process is not None
    engines = engine_processes(victim.process.pid)
    assert len(engines) >= 3
    boot = (await client.member("red", "blue") or {})["incarnation"]
    killed_at = float("inf")
    failures: list[str] = []
    answered = {"red": 0, "green": 0}

    async def keep_asking(entry: str) -> None:
        number = 0
        while time.monotonic() < killed_at + QUIET_S:
            number += 1
            sent = time.monotonic()
            try:
                reply = await client.complete(entry, f"{prose(number, 8)} {entry}", max_tokens=4)
                failed = "" if reply.status == 200 and not reply.error else f"{reply.status} {reply.error}"
                on_victim = reply.target == "blue"
            except OSError as error:
                failed, on_victim = repr(error), False
            if failed and not (on_victim and sent <= killed_at):
                failures.append(f"{entry} request {number}, sent {sent - killed_at:+.2f} s: {failed}")
            answered[entry] += not failed

    async def seen_dead() -> bool:
        views = [await client.member(entry, "blue") for entry in ("red", "green")]
        return all(view is None or view["state"] == "dead" for view in views)

    clients = [asyncio.create_task(keep_asking(entry)) for entry in answered]
    await until(lambda: done(min(answered.values()) >= 3), PATIENCE_S, "clients are being answered")
    killed_at = time.monotonic()
    victim.kill(signal.SIGKILL)
    took = await until(seen_dead, PATIENCE_S, "both others show the killed node dead")
    print(f"dead in both views after {took:.1f} s")
    await asyncio.gather(*clients)
    assert failures == []
    assert min(answered.values()) >= 6

    _, alive = psutil.wait_procs(engines, timeout=PATIENCE_S)
    assert alive == [], "engine processes outlived their node"

    await client.cluster.start("blue")
    await until(lambda: is_back(client, boot), ENGINE_START_LIMIT_S, "the killed node serves again")
    reply = await client.complete("red", "Hello", headers={"x-grapevine-force-target": "blue"})
    assert (reply.status, reply.target) == (200, "blue")


async def done(value: bool) -> bool:
    return value


async def is_back(client: Client, boot: int) -> bool:
    member = await client.member("red", "blue")
    return ready_again(member) and bool(member and member["incarnation"] > boot)


def ready_again(member: dict[str, Any] | None) -> bool:
    return bool(member and member["state"] == "alive" and (member["load"] or {}).get("ready"))


async def test_a_crashed_engine_is_restarted_while_its_node_answers_and_its_pool_stays_warm(client: Client) -> None:
    node = client.cluster["green"]
    assert node.process is not None
    prompt = prose(7, 900)
    here = {"x-grapevine-force-target": "green", "x-grapevine-no-pull": "1"}
    first = await client.complete("green", prompt, headers=here)
    core = next(p for p in engine_processes(node.process.pid) if "EngineCore" in " ".join([p.name(), *p.cmdline()]))
    await client.would_send("red", prompt, "green")
    await reset_engine_cache(client, "green")
    loading = asyncio.create_task(client.complete("red", prompt, headers={"x-grapevine-no-pull": "1"}))
    await asyncio.wait({loading}, timeout=0.2)
    core.kill()
    reply = await loading
    assert (reply.status, reply.text) == (200, first.text), reply.error  # somebody else answered, from the beginning

    async def restarting() -> bool:
        member = await client.member("red", "green")
        return bool(member and member["state"] == "alive" and not ready_again(member))

    async def ready() -> bool:
        return ready_again(await client.member("red", "green"))

    await until(restarting, PATIENCE_S, "the crash shows in the state")
    reply = await client.complete("green", "The capital of France is", max_tokens=4)
    assert reply.status == 200
    assert reply.target != "green"
    await until(ready, ENGINE_START_LIMIT_S, "the engine is restarted")
    # What vLLM counts as a hit it may still fail to load; this counts what was not computed.
    cached = await client.metric("green", "grapevine_actual_cached_tokens_total")
    again = await client.complete("green", prompt, headers=here)
    assert again.text == first.text
    assert await client.metric("green", "grapevine_actual_cached_tokens_total") > cached, "the pool was not warm"


async def test_a_node_that_is_stopped_leaves_at_once_and_what_it_alone_has_computed_to_its_peers(
    client: Client,
) -> None:
    node = client.cluster["blue"]
    assert node.process is not None
    engines = engine_processes(node.process.pid)
    prompt, no_pull = prose(12, 900), {"x-grapevine-no-pull": "1"}
    here = {"x-grapevine-force-target": "blue", **no_pull}
    await client.complete("blue", prompt, headers=here)
    local = await client.complete("blue", prompt, headers=here)
    await client.knows_holder("red", prompt, "blue")
    took = {name: await client.metric(name, "grapevine_taken_blocks_total") for name in ("red", "green")}
    await node.stop()
    assert node.process.returncode == 0
    assert [process for process in engines if process.is_running()] == []

    async def gone() -> bool:
        member = await client.member("red", "blue")
        assert member is None or member["state"] != "dead", "it was found dead: it had said nothing"
        return member is None or member["state"] == "left"

    after = await until(gone, PATIENCE_S, "the others hear that the node left")
    print(f"left in the other's view after {after:.1f} s")

    held = (await client.explain("green", prompt))["matched_chunks"]
    assert held and "blue" not in held, "what it left is known before it is gone"
    cached = {name: await client.metric(name, "grapevine_actual_cached_tokens_total") for name in took}
    reply = await client.complete("green", prompt, headers={**no_pull, "x-grapevine-force-target": next(iter(held))})
    assert (reply.status, reply.text) == (200, local.text)
    heir = reply.target
    found = await client.metric(heir, "grapevine_actual_cached_tokens_total") - cached[heir]
    came = await client.metric(heir, "grapevine_taken_blocks_total") - took[heir]
    print(f"{came:.0f} blocks were left to {heir}, which found {found:.0f} tokens of the prompt")
    assert found >= 6 * 128 and came >= 6
