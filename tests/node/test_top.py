"""`grapevine top` and `models`: the stream of events read, odd answers survived, screens that fit."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gossip import MemberState
from node.cli import main
from node.cli import top as top_command
from node.cli.cluster_view import ClusterView
from node.cli.models import served as models_served
from node.cli.stream import events
from node.cli.top_screen import screen
from node.history import COLUMNS, STEP_S
from tests.node.fakes.cluster import cluster
from tests.node.page.stage import Stage, served


async def run(*args: str) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, main, list(args), env={"COLUMNS": "150"})


def drawn(view: ClusterView, height: int = 40, lost: str = "", width: int = 150) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as captured:
        console.print(screen(view, height, width, lost))
    return captured.get().splitlines()


def looked_at(stage: Stage, ticks: int = 3) -> ClusterView:
    view, picture = ClusterView(), stage.picture()
    view.take("first", json.loads(picture.first()))
    for _ in range(ticks):
        stage.turn()
        view.take("tick", json.loads(picture.tick()))
    return view


async def test_once_shows_nodes_transfers_and_requests() -> None:
    stage = Stage(["red", "green", "blue"])
    stage.age(60)
    async with served(stage) as (url, _):
        result = await run("top", "--once", "--node", url)
        assert result.exit_code == 0, result.output
        for word in ("vineyard", "red *", "green", "Qwen/Qwen3-8B", "3 of 3 nodes", "requests/s", "ran on"):
            assert word in result.output
        told = json.loads((await run("top", "--once", "--json", "--node", url)).output)
        assert told["self"] == "red" and len(told["requests"]) > 3


async def test_without_a_node_it_says_what_to_do() -> None:
    result = await run("top", "--once", "--node", "127.0.0.1:1")
    assert result.exit_code == 3 and "cannot be reached" in result.output


@pytest.mark.parametrize("height", [12, 24, 50])
def test_the_screen_fits_and_shows_the_busiest(height: int) -> None:
    stage = Stage([f"gpu-{index:03}" for index in range(100)])
    stage.age(30)
    stage.states["gpu-007"] = MemberState.DEAD
    view = looked_at(stage)
    lines = drawn(view, height)
    assert len(lines) <= max(height, 26)
    assert "99 of 100 nodes" in lines[0] and any("less busy ones" in line for line in lines)
    assert len(view.requests) <= 50 and len(view._steps) <= 31


@pytest.mark.parametrize("width", [80, 109, 110, 150])
def test_no_number_and_no_name_is_cut_however_narrow_the_terminal(width: int) -> None:
    stage = Stage(["host-a-8100", "host-b-8100", "host-c-8100"])
    stage.age(60)
    lines = drawn(looked_at(stage), width=width)
    assert all(len(line) <= width for line in lines)
    status = next(line.rstrip().rindex("status") for line in lines if line.startswith("ran on"))
    assert all(
        line[status + 3 : status + 6] == "200" for line in lines if line.startswith("host-") and " ms    200" in line
    )
    assert [line for line in lines if line.rstrip().endswith("…")] == []
    (head,) = [line.split() for line in lines if line.startswith("node ")]
    assert {"model", "run", "wait", "KV", "TTFT", "RTT", "age"} <= set(head)
    assert ("prefixes" in head) is (width >= 110)


def test_rates_come_from_the_last_half_minute_and_flows_from_the_last_tick() -> None:
    stage = Stage(["red", "green"])
    stage.age(60)
    view = looked_at(stage, ticks=20)
    rows = stage.past.points(int(stage.now / STEP_S) - 14)
    expected = sum(row[COLUMNS.index("local")] + row[COLUMNS.index("forwarded")] for row in rows) / 30
    assert view.rate("local") + view.rate("forwarded") == pytest.approx(expected)
    assert view.forwards[("red", "green")] == {(a, b): n for a, b, n in stage.flows.forwards()}[("red", "green")]


def test_a_node_that_is_lost_is_told_and_the_last_picture_stays() -> None:
    lines = drawn(looked_at(Stage(["red"])), lost="the node ended the connection")
    assert any("ended the connection" in line for line in lines) and any("red" in line for line in lines)


def test_a_restarted_node_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream ends, cannot be had, and comes again; between the attempts it waits longer each time."""
    pauses: list[float] = []
    answers: list[Any] = [[("first", {})], top_command.Unreachable("gone"), [("first", {}), ("tick", {})]]

    class Fake:
        def __init__(self, url: str) -> None:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            self.events = answer

        def __enter__(self) -> list[Any]:
            return self.events

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(top_command, "Stream", Fake)
    monkeypatch.setattr(top_command.time, "sleep", pauses.append)
    told = top_command._messages("http://x")
    assert [next(told)[0] for _ in range(5)] == ["first", "lost", "lost", "first", "tick"]
    assert pauses == [1.0, 2.0]


def test_empty_and_odd_pictures_are_shown_all_the_same() -> None:
    view = ClusterView()
    view.take("first", {})
    view.take("tick", {"nodes": {"name": ["a"], "state": ["alive"]}, "requests": [{"seq": 1}]})
    assert any("a" in line for line in drawn(view))


@given(
    st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([b"data: {}\n", b"event: tick\n", b"\n"])), max_size=12)
)
def test_whatever_comes_is_an_event_or_an_error_of_value(lines: list[bytes]) -> None:
    try:
        for kind, message in events(lines):
            assert isinstance(kind, str) and isinstance(message, dict)
    except (ValueError, RecursionError):
        pass


def test_events_in_pieces_are_put_together() -> None:
    lines = [b"retry: 1000\n", b"event: first\n", b'data: {"a": 1}\n', b"\n", b"event: tick\n", b"data: {}\n", b"\n"]
    assert list(events(lines)) == [("first", {"a": 1}), ("tick", {})]


async def test_models_are_listed_with_who_serves_them() -> None:
    async with cluster() as nodes:
        await nodes.add("a", models=["m", "one"])
        await nodes.add("b", models=["m"])
        await nodes.agree()
        result = await run("models", "--node", nodes[0].url)
        assert result.exit_code == 0 and "a, b" in result.output and "2 of 2" in result.output
        rows = json.loads((await run("models", "--json", "--node", nodes[0].url)).output)["models"]
        assert [(row["model"], row["nodes"]) for row in rows] == [("m", ["a", "b"]), ("one", ["a"])]


def test_models_of_the_dead_are_not_listed_and_kinds_are_counted() -> None:
    def member(name: str, print_: str, state: str = "alive") -> dict[str, Any]:
        return {"name": name, "state": state, "models": ["m"], "fingerprints": {"m": print_}, "load": None}

    rows = models_served({"members": [member("a", "x"), member("b", "y"), member("c", ""), member("d", "z", "dead")]})
    assert rows == [{"model": "m", "nodes": ["a", "b", "c"], "ready": [], "running": 0, "waiting": 0, "kinds": 2}]
