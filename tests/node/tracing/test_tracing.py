"""One trace for one request, across all nodes that work on it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from node.errors import SettingsError
from node.settings import make_settings
from node.tracing import make_tracing
from node.tracing.export import endpoint
from node.tracing.trace import MAX_TEXT, parent_in
from node.tracing.tracing import Tracing
from tests.node.emulator.pair import CHUNKS, Pair, at, two_nodes
from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, connect
from tests.node.fakes.cluster import Cluster, cluster
from tests.node.fakes.faulty import Decodes, Fault, FaultyEngine
from tests.node.http.bodies import CHAT, chat

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")


class Spans:
    """What the nodes told, by the name of the node."""

    def __init__(self) -> None:
        self._told: dict[str, InMemorySpanExporter] = {}

    def of(self, node: str) -> Tracing:
        self._told[node] = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._told[node]))
        return Tracing(node, provider)

    def named(self, node: str, name: str) -> list[ReadableSpan]:
        return [span for span in self._told[node].get_finished_spans() if span.name == name]

    def one(self, node: str, name: str) -> ReadableSpan:
        (span,) = self.named(node, name)
        return span

    def all(self) -> list[ReadableSpan]:
        return [span for told in self._told.values() for span in told.get_finished_spans()]

    def forget(self) -> None:
        for told in self._told.values():
            told.clear()


def trace_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def within(span: ReadableSpan, outer: ReadableSpan) -> bool:
    assert outer.context is not None
    return span.parent is not None and span.parent.span_id == outer.context.span_id


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@asynccontextmanager
async def traced(count: int = 2, **settings: Any) -> AsyncIterator[tuple[Cluster, Spans]]:
    spans = Spans()
    async with cluster() as nodes:
        for name in "abc"[:count]:
            await nodes.add(name, tracing=spans.of(name), **settings)
        await nodes.agree()
        yield nodes, spans


@pytest.mark.parametrize("sent", [True, False], ids=["in a client's trace", "in one of our own"])
async def test_a_forwarded_request_is_one_trace_down_to_the_engine(sent: bool) -> None:
    async with traced() as (nodes, spans):
        headers = (("x-grapevine-force-target", "b"), *([PARENT] if sent else ()))
        assert (await ask(nodes[0].port, "POST", CHAT, headers, chat())).status == 200
        request, forward = spans.one("a", "request"), spans.one("a", "forward")
        serve, engine = spans.one("b", "serve"), spans.one("b", "engine")
        assert within(forward, request) and within(serve, forward) and within(engine, serve)
        assert within(spans.one("a", "decide"), request)
        assert {trace_id(span) for span in spans.all()} == {TRACE if sent else trace_id(request)}
        if sent:
            assert request.parent is not None and f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
        (given,) = nodes[1].fake.received[-1].header("traceparent")
        assert engine.context is not None
        assert given.startswith(f"00-{trace_id(request)}-{engine.context.span_id:016x}-")
        assert told(request)["grapevine.target"] == "b" and told(request)["http.response.status_code"] == 200
        assert told(spans.one("a", "decide"))["target"] == "b"


async def test_a_request_on_the_own_engine_has_no_forward() -> None:
    async with traced(1) as (nodes, spans):
        assert (await ask(nodes[0].port, "POST", CHAT, (), chat())).status == 200
        assert within(spans.one("a", "engine"), spans.one("a", "request"))
        assert not spans.named("a", "forward")


async def test_an_attempt_that_fails_is_told_and_so_is_the_next_one() -> None:
    async with traced() as (nodes, spans):
        for member in nodes.members:
            member.fake.script = fake.reset
        answer = await ask(nodes[0].port, "POST", CHAT, (), chat())
        assert answer.status == 503
        attempts = [*spans.named("a", "engine"), *spans.named("a", "forward")]
        assert len(attempts) == 2 and not any(span.status.is_ok for span in attempts)
        request = spans.one("a", "request")
        assert not request.status.is_ok and told(request)["http.response.status_code"] == 503


async def test_a_client_that_goes_away_ends_its_spans() -> None:
    async with traced(1) as (nodes, spans):
        a = nodes[0]
        a.fake.script = fake.stall
        async with connect("127.0.0.1", a.port) as client:
            await client.send("POST", CHAT, (), chat())
            await a.fake.until(lambda: a.fake.active == 1)
        await a.fake.until(lambda: a.fake.active == 0)
        await a.until(lambda: not a.node.admission.active)
        assert not spans.one("a", "engine").status.is_ok


async def test_a_wait_in_line_is_a_span() -> None:
    async with traced(1, max_running=1) as (nodes, spans):
        a = nodes[0]
        a.fake.script = fake.stall
        async with connect("127.0.0.1", a.port) as first, connect("127.0.0.1", a.port) as second:
            await first.send("POST", CHAT, (), chat())
            await a.fake.until(lambda: a.fake.active == 1)
            await second.send("POST", CHAT, (), chat())
            await a.until(lambda: len(a.node.room) == 1)
            a.fake.script = fake.answer_chat
            first.writer.close()
            assert (await second.answer("POST")).status == 200
        assert len(spans.named("a", "queue")) == 1


async def test_a_context_that_makes_no_sense_begins_a_new_trace() -> None:
    async with traced(1) as (nodes, spans):
        for value in ("", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "ff" * 300, "\xff"):
            spans.forget()
            assert (await ask(nodes[0].port, "POST", CHAT, (("traceparent", value),), chat())).status == 200
            assert spans.one("a", "request").parent is None


async def test_without_traces_the_context_of_a_client_goes_on_as_it_is() -> None:
    async with cluster(2) as nodes:
        headers = (("x-grapevine-force-target", "b"), PARENT)
        assert (await ask(nodes[0].port, "POST", CHAT, headers, chat())).status == 200
        assert nodes[1].fake.received[-1].header("traceparent") == [PARENT[1]]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Pair, Spans]]:
    spans = Spans()
    async with two_nodes(tmp_path, lambda name: {"tracing": spans.of(name)}) as both:
        yield both, spans


async def test_blocks_that_are_pulled_are_in_the_trace_of_their_request(pair: tuple[Pair, Spans]) -> None:
    both, spans = pair
    bob = both.nodes[1]
    await both.send(0, *at("ann"))
    await both.until(lambda: bob.registry.roster.prefixes.count("ann") == CHUNKS)
    spans.forget()
    await both.send(0, *at("bob", "ann"), PARENT)
    pull = spans.one("bob", "pull")
    assert within(pull, spans.one("bob", "serve")) and told(pull)["source"] == "ann" and told(pull)["blocks"] > 20
    lookup = spans.one("ann", "lookup")
    assert within(lookup, pull) and told(lookup)["peer"] == "bob" and told(lookup)["blocks"] > 20
    assert {trace_id(span) for span in spans.all()} == {TRACE}
    assert {"decide", "forward", "request"} <= {span.name for span in spans.all()}
    assert json.dumps(told(pull)).isascii()


def test_a_collector_is_a_url_with_or_without_a_path() -> None:
    assert endpoint("http://c:4318") == endpoint("http://c:4318/") == "http://c:4318/v1/traces"
    assert endpoint("https://c/otlp/t") == "https://c/otlp/t"
    with pytest.raises(SettingsError, match="--otlp-traces-endpoint"):
        make_settings(otlp_traces_endpoint="collector:4318")


def test_a_node_that_cannot_trace_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_tracing(make_settings()) is None
    monkeypatch.setitem(sys.modules, "node.tracing.export", None)
    with pytest.raises(SettingsError, match=r"vllm-grapevine\[otel\]"):
        make_tracing(make_settings(otlp_traces_endpoint="http://127.0.0.1:1"))


def test_texts_are_bounded() -> None:
    spans = Spans()
    tracer = spans.of("a")._tracer
    from opentelemetry.trace import SpanKind

    from node.tracing.trace import begin

    trace = begin(tracer, "x", {"long": "y" * 10_000}, parent=parent_in([]), kind=SpanKind.INTERNAL)
    trace.end({"more": "z" * 10_000}, error="w" * 10_000)
    trace.end(error="a second end is no harm")
    span = spans.one("a", "x")
    assert {len(str(value)) for value in told(span).values()} == {MAX_TEXT}
    assert span.status.description == "w" * MAX_TEXT


async def test_spans_reach_a_collector_at_the_latest_when_the_node_stops() -> None:
    """The real exporter, over HTTP."""
    got: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        got.append(await request.read())
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    async with TestServer(app) as collector:
        async with cluster() as nodes:
            a = await nodes.add("a", otlp_traces_endpoint=f"http://127.0.0.1:{collector.port}")
            assert (await ask(a.port, "POST", CHAT, (PARENT,), chat())).status == 200
        sent = b"".join(got)
    assert bytes.fromhex(TRACE) in sent and b"grapevine" in sent
    assert all(name in sent for name in (b"request", b"decide", b"engine"))


async def test_a_collector_that_is_away_holds_up_no_request_and_no_stop() -> None:
    async with asyncio.timeout(30), cluster() as nodes:
        a = await nodes.add("a", otlp_traces_endpoint="http://127.0.0.1:1")
        assert (await ask(a.port, "POST", CHAT, (), chat())).status == 200


async def test_a_stream_that_is_carried_is_told_with_both_its_legs() -> None:
    spans = Spans()
    async with cluster() as nodes:
        for name in "ab":
            engine = FaultyEngine(nodes.folder / f"{name}.fake", decodes=Decodes())
            await nodes.add(name, engine=engine, tracing=spans.of(name))
        await nodes.agree()
        nodes[1].faulty.faults = [Fault(4, "reset")]
        body = chat(max_tokens=12, temperature=0, ignore_eos=True, stream=True)
        answer = await ask(nodes[0].port, "POST", CHAT, (("x-grapevine-force-target", "b"),), body)
        assert answer.complete and answer.body.endswith(b"data: [DONE]\n\n")
        carry, request = spans.one("a", "carry"), spans.one("a", "request")
        assert within(carry, request) and told(carry)["from"] == "b"
        assert within(spans.one("a", "forward"), request) and within(spans.one("a", "engine"), request)
        assert not spans.one("a", "forward").status.is_ok and request.status.is_unset
        assert len({trace_id(span) for span in spans.all()}) == 1
