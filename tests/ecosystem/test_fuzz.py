"""Whatever is sent to whichever route of a node: an answer that docs/http.md knows, and never a failure of ours."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.addresses import join_address
from node.assembly import Node
from node.emulator import EngineConfig, Timing
from node.emulator.serve.server import EmulatedServer, ServeOptions
from node.settings import make_settings
from tests.ecosystem.fuzzing import BODIES, MODEL, TOKEN, Wild, requests
from tests.node.fakes.client import RawAnswer, connect
from tests.node.fakes.cluster import FAST_GOSSIP
from tests.waiting import PATIENCE_S

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
ENGINE = EngineConfig(
    name="t", timing=Timing(step_s=1e-5, prefill_s=1e-7), block_size=16, kv_tokens=4096, step_tokens=2048,
    max_model_len=128,
)  # fmt: skip
#: Of what a node itself answers, beside the table of errors.
GOOD = {200, 202, 204, 304}
#: Of an engine, whose errors go through unchanged; 500 is not among them.
ENGINE_STATUSES = {200, 400, 404, 405, 413, 415, 422}
#: Requests to each route.
EXAMPLES = 40
#: Seconds for one example, on a machine that is busy elsewhere.
LIMIT_S = 60.0


def documented() -> dict[int, set[str]]:
    """The statuses of the table of errors in docs/http.md, with their codes."""
    found: dict[int, set[str]] = {}
    for statuses, codes in re.findall(
        r"^\| ([\d, ]+) \| (`[^|]+`) \|", (ROOT / "docs/http.md").read_text(), re.MULTILINE
    ):
        for status in statuses.split(", "):
            found.setdefault(int(status), set()).update(re.findall(r"`(\w+)`", codes))
    return found


ERRORS = documented()


class Lab:
    """Two real nodes with emulated engines, in a loop of their own, so that examples are drawn outside of it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()
        self.nodes: list[Node] = []
        self._thread.start()

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(LIMIT_S)

    async def start(self, folder: Path) -> None:
        for name in ("a", "b"):
            engine = await self._stack.enter_async_context(EmulatedServer(ENGINE, ServeOptions(models=(MODEL,))))
            seeds = tuple(join_address(*node.gossip.address) for node in self.nodes)
            node = Node(
                make_settings(
                    name=name, port=0, gossip_port=0, kv_port=0, mdns=False, stop_grace_s=0.2, join=seeds,
                    kv_pool_gib=0.001, admin_token=TOKEN, state_dir=folder / "state", run_dir=folder / "run",
                    engine_url=f"http://127.0.0.1:{engine.port}",
                ),
                gossip_config=FAST_GOSSIP, rng=random.Random(name),
            )  # fmt: skip
            await node.start()
            self._stack.push_async_callback(node.stop)
            node._on_leave = lambda: None
            self.nodes.append(node)
        changed = asyncio.Event()
        self.nodes[0].registry.subscribe(changed.set)
        async with asyncio.timeout(PATIENCE_S):
            while self.nodes[0].registry.serving() != ["a", "b"]:
                changed.clear()
                await changed.wait()

    def routes(self) -> list[tuple[str, str]]:
        """Every route: the node's own table is asked, so that a new one is not forgotten."""
        made = self.nodes[0]._routes
        assert made is not None
        router = made.router()
        exact = [
            ("POST" if method == "*" else method, path)
            for path, methods in router._exact.items()
            for method in methods
            if not path.startswith("/page/") or path == "/page/events"
        ]
        prefixes = [("POST", prefix.rstrip("/") + "/") for prefix, _ in router._prefixes]
        return sorted({*exact, *prefixes, *(("POST", path) for path in BODIES)})

    async def send(self, wild: Wild) -> RawAnswer:
        """The answer; of a stream without an end its head."""
        node = self.nodes[0]
        async with connect("127.0.0.1", node.http_port) as client, asyncio.timeout(LIMIT_S):
            await client.send(wild.method, wild.target, wild.headers, wild.body)
            head = await client.head()
            while head.status == 100:
                head = await client.head()
            if head.status == 200 and wild.target.startswith("/page/events"):
                return head
            body = b""
            if wild.method != "HEAD" and head.status not in (204, 304):
                async for piece in client.pieces(head):
                    body += piece
        if node.admission.draining:
            await node.resume()
        return RawAnswer(head.status, head.reason, head.headers, body)

    def close(self) -> None:
        self.do(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="gv-") as folder:
        made = Lab()
        made.do(made.start(Path(folder)))
        yield made
        made.close()


def check(answer: RawAnswer, wild: Wild) -> None:
    """Raises when it is none of those that are documented."""
    if answer.one("x-grapevine-target") is not None and answer.status not in ERRORS:
        assert answer.status in ENGINE_STATUSES, (wild, answer)
        return
    if answer.status in GOOD:
        return
    assert answer.status in ERRORS and answer.status != 500, (wild, answer)
    if wild.method == "HEAD" or answer.one("x-grapevine-target") is not None:
        return
    error = json.loads(answer.body)["error"]
    assert error["message"] and (error["code"] in ERRORS[answer.status] or "peer" in wild.target), (wild, answer)


def test_no_request_makes_a_node_fail(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    routes = lab.routes()
    assert len(routes) > 25

    # Fewer than usual, for each of many routes; with --hypothesis-profile=search as many as that says.
    many = EXAMPLES if settings().derandomize else settings().max_examples

    @settings(max_examples=many, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def hammer(data: st.DataObject) -> None:
        wild = data.draw(requests(method, path))
        caplog.clear()
        check(lab.do(lab.send(wild)), wild)
        failures = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert failures == [], wild

    faults = []
    for method, path in routes:
        try:
            hammer()
        except (Exception, ExceptionGroup) as fault:  # the other routes are tried all the same
            faults.append(f"{method} {path}: {fault}")
    assert faults == [], "\n".join(faults)


def test_afterwards_it_serves_as_before(lab: Lab) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2}).encode()
    answer = lab.do(lab.send(Wild("POST", "/v1/completions", (), body)))
    assert answer.status == 200 and json.loads(answer.body)["usage"]["completion_tokens"] == 2
    for node in lab.nodes:
        node.admission.validate()
        node.room.validate()
