"""The node's own log: which form, and what each line carries."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from node import logs
from node.logs import MAX_MESSAGE, ConsoleLines, JsonLines, set_up
from node.settings import make_settings
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import cluster
from tests.node.http.bodies import CHAT, chat


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("grapevine.http", logging.WARNING, "f", 1, message, args, None)


def line(message: str, *args: object) -> dict[str, Any]:
    told = JsonLines("host-a").format(record(message, *args))
    assert "\n" not in told
    return dict(json.loads(told))


class Terminal(io.StringIO):
    def __init__(self, *, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@pytest.fixture
def kept() -> Iterator[None]:
    """The logging of the tests comes back."""
    root, ours, zeroconf = (logging.getLogger(name) for name in ("", "grapevine", "zeroconf"))
    before = (root.handlers[:], root.level, ours.level)
    yield
    zeroconf.setLevel(logging.NOTSET)
    root.handlers[:], _, _ = before
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.parametrize(
    ("form", "tty", "json_lines"),
    [("auto", True, False), ("auto", False, True), ("json", True, True), ("console", False, False)],
)
def test_people_get_lines_and_machines_get_json(
    monkeypatch: pytest.MonkeyPatch, kept: None, form: str, tty: bool, json_lines: bool
) -> None:
    err = Terminal(tty=tty)
    monkeypatch.setattr("sys.stderr", err)
    set_up(make_settings(log_format=form, name="host-a"))
    logging.getLogger("grapevine.kv").warning("pulled %d", 3)
    assert err.getvalue().startswith("{") == json_lines
    if json_lines:
        told = json.loads(err.getvalue())
        assert (told["message"], told["node"], told["level"], told["logger"]) == (
            "pulled 3",
            "host-a",
            "warning",
            "grapevine.kv",
        )


def test_an_interface_without_multicast_is_told_to_who_debugs_only(monkeypatch: pytest.MonkeyPatch, kept: None) -> None:
    for level, told in (("info", False), ("debug", True)):
        err = Terminal(tty=True)
        monkeypatch.setattr("sys.stderr", err)
        set_up(make_settings(log_level=level))
        logging.getLogger("zeroconf").warning("Address not available when binding")
        assert ("Address not available" in err.getvalue()) is told


def test_foreign_text_breaks_no_line_and_is_bounded() -> None:
    assert line("%s", "a\nb\x1b[31m")["message"] == "a\nb\x1b[31m"
    assert len(line("%s", "x" * 10_000)["message"]) == MAX_MESSAGE
    assert "\x1b" not in ConsoleLines().format(record("%s", "\x1b[31m"))


async def test_each_task_has_the_id_of_its_own_request() -> None:
    async def work(rid: str, other: asyncio.Event, mine: asyncio.Event) -> dict[str, Any]:
        logs.set_request(rid)
        mine.set()
        await other.wait()
        return line("x")

    one, two = asyncio.Event(), asyncio.Event()
    told = await asyncio.gather(asyncio.create_task(work("r1", one, two)), asyncio.create_task(work("r2", two, one)))
    assert [entry["request_id"] for entry in told] == ["r1", "r2"]
    assert "request_id" not in line("x")
    set_in_this_task = line("x")
    assert "request_id" not in set_in_this_task


async def test_what_fails_in_a_request_is_logged_with_its_id_at_entry_and_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(2) as nodes:
        told: list[str] = []
        handler = logging.StreamHandler(io.StringIO())
        handler.setFormatter(JsonLines("n"))
        handler.emit = lambda record: told.append(handler.format(record))  # type: ignore[method-assign]
        log = logging.getLogger("grapevine.http")
        log.addHandler(handler)
        try:
            for member in nodes.members:  # the target's failure, then the entry's

                async def broken(*_: object, **__: object) -> None:
                    raise RuntimeError("a bug")

                monkeypatch.setattr(member.node.local, "open", broken)
            headers = (("x-grapevine-force-target", "b"), ("X-Request-Id", "mine-7"))
            await ask(nodes[0].port, "POST", CHAT, headers, chat())
            await ask(nodes[0].port, "POST", CHAT, (("x-grapevine-force-target", "a"), headers[1]), chat())
        finally:
            log.removeHandler(handler)
        failed = [json.loads(text) for text in told if "a handler failed" in text]
        assert len(failed) >= 2 and all(entry["request_id"] == "mine-7" for entry in failed)
        assert all("RuntimeError" in entry["exception"] for entry in failed)
