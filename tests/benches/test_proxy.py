"""The bench of the data plane: its backend and load against each other, and its figures by hand-computed numbers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from benches import peers
from benches.proxy import TARGETS, procs
from benches.proxy.backend import Answers, Connection
from benches.proxy.figures import Table, report
from benches.proxy.load import Kind, Run, body_of, request_of
from benches.proxy.measure import Sample, sample_of, slope
from benches.result import Result


@asynccontextmanager
async def backend(name: str) -> AsyncIterator[int]:
    loop = asyncio.get_running_loop()
    answers = Answers(name, "bench")
    async with await loop.create_server(lambda: Connection(answers, loop), "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_the_load_counts_what_the_backend_sends() -> None:
    async with backend("a") as port:
        told = await Run([port], Kind(2, tokens=3, stream=True)).measure(5.0, 10)
    assert (told["requests"], told["failed"], told["events"]) == (10, 0, 10 * 4)
    assert told["whole"][1] >= told["whole"][0] >= told["first"][0] > 0


async def test_requests_of_a_session_that_are_spread_show_in_the_affinity() -> None:
    async with backend("a") as a, backend("b") as b:
        alone = await Run([a], Kind(2, sessions=2)).measure(5.0, 8)
        spread = await Run([a, b], Kind(2, sessions=1)).measure(5.0, 8)
    assert alone["affinity"] == 1.0 and 0.5 <= spread["affinity"] < 1.0


async def test_what_is_no_answer_is_counted_as_failed() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 No\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        told = await Run([server.sockets[0].getsockname()[1]], Kind(1)).measure(5.0, 3)
    assert (told["requests"], told["failed"]) == (0, 3)


async def test_the_backend_takes_requests_however_they_are_framed() -> None:
    body = body_of(Kind(1, tokens=2), 0)
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    async with backend("a") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_of(body) + chunked % (len(body), body) + b"GET /nothing HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(60):
            found = [await reader.readuntil(b"\r\n\r\n") for _ in range(1)]
            await reader.readuntil(b"}}")
            found += [await reader.readuntil(b"\r\n\r\n")]
            await reader.readuntil(b"}}")
            found += [await reader.readuntil(b"\r\n\r\n")]
        writer.close()
    assert [head.split(b" ")[1] for head in found] == [b"200", b"200", b"404"]


def sample(**changed: float) -> Sample:
    given: dict[str, float] = dict.fromkeys(Sample.__slots__, 1.0)
    return Sample(**given | {"failed": 0} | changed)  # type: ignore[arg-type]


def test_a_ratio_is_taken_within_a_round_and_the_median_over_the_rounds() -> None:
    table: Table = {
        ("c1", "direct"): [sample(p50=1.0), sample(p50=1.0), sample(p50=2.0)],
        ("c1", "sglang"): [sample(p50=2.0), sample(p50=3.0), sample(p50=3.0)],
        ("c1", "local"): [sample(p50=4.0), sample(p50=2.0), sample(p50=4.0)],
        ("paced", "local"): [sample(ttft50=3.0)],
        ("paced", "sglang"): [sample(ttft50=4.0)],
        ("paced", "smg"): [sample(ttft50=2.0)],
    }
    result = Result("proxy", TARGETS, machine={})
    report(result, table)
    assert result.figures["local_added_p50_c1_over_sglang"] == 2.0  # of 3, 0.5 and 2
    assert result.figures["local_paced_ttft_p50_over_best_router"] == 1.5
    assert "local_rps_c16_over_sglang" not in result.figures
    assert "local_added_p50_c1_over_sglang" in result.short()


def test_a_measurement_without_an_answer_makes_no_figure() -> None:
    none = sample_of(
        {"requests": 0, "failed": 5, "events": 0, "seconds": 1.0, "affinity": 0.0, "whole": [0, 0], "first": [0, 0]},
        1.0,
        False,
    )
    result = Result("proxy", TARGETS, machine={})
    report(result, {("c16", "local"): [none], ("c16", "sglang"): [sample()]})
    assert not [name for name in result.figures if name.startswith("local")]
    assert any("5 requests failed" in note for note in result.notes)


def test_the_slope_of_memory_is_in_megabytes_per_million_requests() -> None:
    held = 100.0

    def more(requests: int) -> float:
        nonlocal held
        held += requests * 3e-6
        return held

    assert slope(more, 100_000) == pytest.approx(3.0)


def test_processes_are_counted_with_their_children() -> None:
    me = os.getpid()
    assert me in procs.family([os.getppid()]) and procs.cpu_s([me]) > 0 and procs.rss_mb([me]) > 1
    assert procs.cpu_s([2**22 + 1]) == procs.rss_mb([2**22 + 1]) == 0.0


def test_a_peer_that_cannot_be_had_is_named_and_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["install", "production-stack"]) == 0
    assert "skipped" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        peers.main(["install", "nobody"])
