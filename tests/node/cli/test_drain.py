"""`grapevine drain`, `leave` and `join` against nodes that run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result

from node.cli import drain as command
from node.cli import main
from node.cli.pauses import Pauses, measured
from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import Cluster, cluster
from tests.node.fakes.engine import Gate
from tests.node.http.bodies import CHAT, chat

TOKEN = "secret"


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with cluster(2, admin_token=TOKEN, stop_grace_s=30) as made:
        yield made


async def grapevine(nodes: Cluster, *words: str, asked: int = 0, token: str = TOKEN) -> Result:
    """Type a command; node `asked` is the one that is asked where the others are."""
    words = (*words, "--node", nodes[asked].url, "--admin-token", token)
    return await asyncio.to_thread(CliRunner().invoke, main, list(words))


async def test_a_drained_node_takes_nothing_new_until_it_joins(nodes: Cluster) -> None:
    a, b = nodes[0], nodes[1]
    drained = await grapevine(nodes, "drain", "b")
    assert drained.exit_code == 0 and "b is drained after" in drained.output, drained.output
    assert b.node.admission.draining
    await a.until(lambda: a.sees(["a"]))
    through = await ask(b.port, "POST", CHAT, (), chat())
    assert (through.status, through.one("x-grapevine-target")) == (200, "a")
    joined = await grapevine(nodes, "join", "b")
    assert (joined.exit_code, joined.output) == (0, "b takes work\n")
    await a.until(lambda: a.sees(["a", "b"]))


async def test_a_node_that_runs_joins_another_by_its_address(nodes: Cluster) -> None:
    async with cluster() as others:
        lonely = await others.add("lonely", admin_token=TOKEN)
        done = await grapevine(others, "join", "{}:{}".format(*nodes[0].node.gossip.address), "--json")
        assert done.exit_code == 0, done.output
        assert set(json.loads(done.stdout)["others"]) & {"a", "b"}
        await lonely.until(lambda: lonely.sees(["a", "b", "lonely"]))


async def test_an_address_where_nobody_is_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PATIENCE_S", 1.0)
    async with cluster() as others:
        await others.add("lonely", admin_token=TOKEN)
        done = await grapevine(others, "join", "127.0.0.1:1")
        assert done.exit_code == 1 and "127.0.0.1:1 refuses the connection" in done.output
        assert (await grapevine(others, "join", "127.0.0.1:x")).exit_code == 2


async def test_what_cannot_move_is_waited_for_and_then_told(nodes: Cluster) -> None:
    b, gate = nodes[1], Gate()
    b.fake.script = fake.hold(gate)
    running = asyncio.create_task(ask(b.port, "POST", CHAT, (("x-grapevine-force-target", "b"),), chat()))
    await b.fake.until(lambda: b.fake.active == 1)
    overdue = await grapevine(nodes, "drain", "b", "--timeout", "0")
    assert overdue.exit_code == 1
    assert "still runs 1 requests" in overdue.output and "grapevine join b" in overdue.output
    gate.open()
    assert (await running).status == 200
    told = json.loads((await grapevine(nodes, "drain", "b", "--json")).stdout)
    assert (told["name"], told["phase"], told["running"], told["moved_streams"]) == ("b", "drained", 0, 0)


async def test_a_node_that_is_told_to_leave_ends_and_is_known_as_left(nodes: Cluster) -> None:
    a, b = nodes[0], nodes[1]
    loop, ending = asyncio.get_running_loop(), asyncio.Event()

    b.node._on_leave = ending.set
    stopped = loop.create_task(stop_when(ending, b.node.stop))
    told = json.loads((await grapevine(nodes, "leave", "b", "--json")).stdout)
    await stopped
    assert (told["name"], told["state"]) == ("b", "left")
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert answer.one("x-grapevine-target") == "a"
    again = await grapevine(nodes, "drain", "b")
    assert again.exit_code == 1 and "b is left; running are a" in again.output


async def stop_when(asked: asyncio.Event, stop: object) -> None:
    await asked.wait()
    assert callable(stop)
    await stop()


async def test_a_name_that_nobody_has_is_told_with_those_that_run(nodes: Cluster) -> None:
    result = await grapevine(nodes, "drain", "c")
    assert result.exit_code == 1 and "c is not a node of this cluster; running are a, b" in result.output


async def test_a_wrong_token_changes_nothing(nodes: Cluster) -> None:
    result = await grapevine(nodes, "drain", "b", token="wrong")
    assert result.exit_code == 1 and "403" in result.output
    assert not nodes[1].node.admission.draining


PAGE = """\
grapevine_carry_pause_seconds_bucket{cause="moved",le="0.05"} 3.0
grapevine_carry_pause_seconds_bucket{cause="moved",le="0.1"} 4.0
grapevine_carry_pause_seconds_bucket{cause="moved",le="+Inf"} 4.0
grapevine_carry_pause_seconds_count{cause="moved"} 4.0
grapevine_carry_pause_seconds_sum{cause="moved"} 0.2
grapevine_carry_pause_seconds_count{cause="died"} 9.0
"""


def test_pauses_of_moved_streams_are_read_from_metrics_and_nothing_else_is() -> None:
    pauses = measured(PAGE)
    assert (pauses.count, pauses.mean_ms, pauses.most_ms) == (4, pytest.approx(50.0), 100.0)
    assert str(pauses) == "4 streams moved, held up 50 ms in the mean, none above 100 ms"
    assert str(Pauses()) == str(pauses - pauses) == "no stream had to move"
    assert (pauses + pauses - pauses) == pauses
