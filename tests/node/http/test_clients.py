"""Clients with keys of a file, at a node: limits, reload, and what the others see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from node.errors import SettingsError
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask, connect
from tests.node.fakes.cluster import Member, cluster
from tests.node.fakes.engine import Gate
from tests.node.http.bodies import CHAT, chat

ONE, TWO = "key-of-the-first-one", "key-of-the-second-one"


@asynccontextmanager
async def node_with(path: Path, *lines: str, **settings: object) -> AsyncIterator[Member]:
    rewrite(path, *lines)
    async with cluster() as nodes:
        yield await nodes.add("a", clients_file=str(path), **settings)


def rewrite(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines))


async def post(member: Member, key: str, body: bytes | None = None) -> RawAnswer:
    return await ask(member.port, "POST", CHAT, (("Authorization", f"Bearer {key}"),), body or chat())


async def metric(member: Member, name: str) -> float:
    page = (await ask(member.port, "GET", "/metrics")).body.decode()
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


async def test_only_keys_of_the_file_are_let_in_and_none_goes_on(tmp_path: Path) -> None:
    async with node_with(tmp_path / "f", f"one {ONE}", api_key=("of-the-settings",)) as a:
        assert (await ask(a.port, "POST", CHAT, (), chat())).status == 401
        assert (await post(a, TWO)).status == 401
        assert (await post(a, ONE)).status == (await post(a, "of-the-settings")).status == 200
        assert not any(received.header("authorization") for received in a.fake.received)
        assert await metric(a, "grapevine_unknown_client_requests_total") == 2
        assert await metric(a, 'grapevine_client_requests_total{client="one"}') == 1


async def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    async with node_with(tmp_path / "f") as a:
        assert (await post(a, ONE)).status == (await post(a, "")).status == 401


async def test_requests_at_a_time_are_bounded_by_client(tmp_path: Path) -> None:
    async with node_with(tmp_path / "f", f"one {ONE} max-running=1", f"two {TWO}") as a:
        gate = Gate()
        a.fake.script = fake.gated(gate, [fake.sse("x"), fake.DONE])
        async with connect("127.0.0.1", a.port) as client:
            await client.send("POST", CHAT, (("Authorization", f"Bearer {ONE}"),), chat(stream=True))
            await a.fake.until(lambda: a.fake.active == 1)
            refused = await post(a, ONE)
            assert refused.status == 429 and b'"client_limit_reached"' in refused.body
            assert int(refused.one("retry-after") or "") >= 1
            a.fake.script = fake.answer_chat
            assert (await post(a, TWO)).status == 200
            assert await metric(a, 'grapevine_client_running_requests{client="one"}') == 1
        await a.fake.until(lambda: a.fake.active == 0)
        await a.until(lambda: not a.node.admission.active)
        assert (await post(a, ONE)).status == 200, "a client that went away gave its place back"


async def test_requests_and_tokens_of_a_minute_are_bounded(tmp_path: Path) -> None:
    lines = (f"one {ONE} requests-per-minute=2", f"two {TWO} tokens-per-minute=1000")
    async with node_with(tmp_path / "f", *lines) as a:
        statuses = [(await post(a, ONE)).status for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert (await post(a, TWO, chat(max_tokens=900))).status == 200
        refused = await post(a, TWO, chat(max_tokens=900))
        assert refused.status == 429 and 40 <= int(refused.one("retry-after") or "") <= 60
        never = await post(a, TWO, chat(max_tokens=600, n=2))
        assert never.status == 400 and never.one("retry-after") is None
        assert await metric(a, 'grapevine_client_refusals_total{client="two",limit="tokens"}') == 2


async def test_a_changed_file_counts_at_once_and_a_broken_one_not(tmp_path: Path) -> None:
    path = tmp_path / "f"
    async with node_with(path, f"one {ONE}") as a:
        rewrite(path, f"two {TWO}")
        await a.node.reloader.look()
        assert ((await post(a, ONE)).status, (await post(a, TWO)).status) == (401, 200)
        rewrite(path, "two")
        await a.node.reloader.look()
        assert (await post(a, TWO)).status == 200


async def test_a_node_does_not_start_with_a_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="line 1"):
        async with node_with(tmp_path / "f", "one"):
            pass
