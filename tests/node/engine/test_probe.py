"""Questions to an engine, over a Unix socket and over a URL, and answers that are wrong in every way."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from node.engine import probe
from node.engine.client import EngineAddress, engine_address, open_probes
from node.engine.events import EngineModel
from node.engine.processes import spawn
from node.errors import EngineError
from node.settings import make_settings

FAKE = str(Path(__file__).with_name("fake_engine.py"))


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, EngineAddress]]:
    address = EngineAddress(socket=tmp_path / "s")
    up = asyncio.Event()
    process = await spawn([sys.executable, FAKE, str(address.socket)], dict(os.environ), f"probe-{tmp_path}")
    pump = asyncio.create_task(process.pump(lambda line: up.set()))
    await asyncio.wait_for(up.wait(), 60)
    async with open_probes(address) as session:
        yield session, address
    process.kill()
    await process.wait()
    await pump


async def serve(*routes: web.RouteDef) -> tuple[web.AppRunner, EngineAddress]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, EngineAddress(base=f"http://127.0.0.1:{runner.addresses[0][1]}")


async def test_a_vllm_engine_tells_all(engine: tuple[aiohttp.ClientSession, EngineAddress]) -> None:
    session, address = engine
    assert await probe.probe_health(session, address, 5) == probe.Health(ok=True)
    models = await probe.probe_models(session, address, 5)
    assert models == (EngineModel("small", "/models/small", None, 4096),)
    assert await probe.probe_version(session, address, 5) == "0.32.0"
    assert await probe.probe_metrics(session, address, 5) == probe.EngineMetrics(
        running=3, waiting=2, kv_use=0.25, prefix_queries=1000, prefix_hits=512, external_hits=128, kv_tokens=128 * 364
    )


async def test_a_server_without_health_and_metrics_will_do() -> None:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "x"}]})

    runner, address = await serve(web.get("/v1/models", models))
    async with open_probes(address) as session:
        assert (await probe.probe_health(session, address, 5)).ok
        assert await probe.probe_models(session, address, 5) == (EngineModel("x"),)
        assert await probe.probe_version(session, address, 5) == ""
        assert await probe.probe_kv_tokens(session, address, 5) == 0
        assert await probe.probe_metrics(session, address, 5) is None
    await runner.cleanup()


async def test_an_engine_that_is_not_there_refuses(tmp_path: Path) -> None:
    address = EngineAddress(socket=tmp_path / "nobody")
    async with open_probes(address) as session:
        health = await probe.probe_health(session, address, 5)
        assert (health.ok, health.refused) == (False, True)
        with pytest.raises(EngineError, match="cannot be reached"):
            await probe.probe_models(session, address, 5)


async def test_a_slow_engine_is_late_and_not_absent() -> None:
    never = asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    runner, address = await serve(web.get("/health", wait))
    async with open_probes(address) as session:
        health = await probe.probe_health(session, address, 0.05)
        assert (health.ok, health.refused) == (False, False)
        assert "within 0.05 s" in health.detail
    never.set()
    await runner.cleanup()


async def test_an_answer_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_ANSWER_BYTES", 1000)

    async def flood(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 1001)

    runner, address = await serve(web.get("/v1/models", flood), web.get("/metrics", flood))
    async with open_probes(address) as session:
        with pytest.raises(EngineError, match="more than 1000 bytes"):
            await probe.probe_models(session, address, 5)
        assert await probe.probe_kv_tokens(session, address, 5) == 0
    await runner.cleanup()


async def test_the_key_of_the_engine_is_sent_and_its_lack_is_told() -> None:
    async def models(request: web.Request) -> web.Response:
        good = request.headers.get("authorization") == "Bearer k"
        return web.json_response({"data": [{"id": "x"}]}) if good else web.Response(status=401)

    runner, address = await serve(web.get("/v1/models", models))
    for key, good in (("k", True), ("", False)):
        keyed = EngineAddress(base=address.base, api_key=key)
        async with open_probes(keyed) as session:
            if good:
                assert await probe.probe_models(session, keyed, 5)
            else:
                with pytest.raises(EngineError, match="--engine-api-key"):
                    await probe.probe_models(session, keyed, 5)
    await runner.cleanup()


@pytest.mark.parametrize(
    ("given_url", "url"),
    [
        ("http://h:8000", "http://h:8000/v1/models"),
        ("http://h:8000/v1/", "http://h:8000/v1/models"),
        ("https://h/gate/way/v1", "https://h/gate/way/v1/models"),
    ],
)
def test_a_base_path_is_kept_and_an_ending_v1_is_not_doubled(given_url: str, url: str) -> None:
    assert str(engine_address(make_settings(engine_url=given_url)).url("/v1/models")) == url


def test_a_query_passes_as_it_is() -> None:
    assert str(EngineAddress().url("/v1/x?a=%2F+b&c")) == "http://engine/v1/x?a=%2F+b&c"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries({}, optional=dict.fromkeys(("id", "root", "parent", "max_model_len"), JSON))


@given(st.one_of(st.binary(max_size=60), JSON.map(json.dumps).map(str.encode)))
def test_any_bytes_give_models_or_an_engine_error(body: bytes) -> None:
    with contextlib.suppress(EngineError):
        probe.parse_models(body)


@given(st.lists(ENTRY, max_size=6))
def test_any_entry_gives_a_bounded_model(entries: list[dict[str, object]]) -> None:
    for model in probe.parse_models(json.dumps({"data": entries}).encode()):
        assert 0 < len(model.id) <= probe.MAX_MODEL_NAME
        assert model.max_model_len is None or model.max_model_len > 0


def test_base_models_come_before_their_adapters() -> None:
    body = json.dumps({"data": [{"id": "a", "parent": "b"}, {"id": "b"}]}).encode()
    assert [model.id for model in probe.parse_models(body)] == ["b", "a"]


def test_metrics_of_several_engines_are_summed_but_the_use_of_their_caches_and_nonsense_is_zero() -> None:
    lines = ['vllm:num_requests_running{engine="0"} 2.0', 'vllm:num_requests_running{engine="1"} 3.0']
    lines += [
        "vllm:num_requests_waiting NaN",
        "vllm:kv_cache_usage_perc 7",
        "vllm:kv_cache_usage_perc 0.5",
        "vllm:prefix_cache_hits_total{} x",
        "vllm:",
    ]
    assert probe.parse_metrics(lines) == probe.EngineMetrics(running=5, kv_use=1.0)
    assert probe.parse_metrics(["python_gc 3", "# vllm"]) is None


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        (('block_size="16",num_gpu_blocks="100"',), 1600),
        (('block_size="16",num_gpu_blocks="100"', 'block_size="16",num_gpu_blocks="90"'), 1440),
        (('num_gpu_blocks="None",block_size="16"',), 0),
        (('x_block_size="7",num_gpu_blocks="100"',), 0),
        ((f'block_size="16",num_gpu_blocks="{"9" * 99}"',), 0),
        ((), 0),
    ],
)
def test_the_kv_cache_is_as_large_as_its_labels_say_and_of_several_engines_the_smallest_counts(
    labels: tuple[str, ...], tokens: int
) -> None:
    lines = ["vllm:num_requests_running 1", *(f"vllm:cache_config_info{{{each}}} 1.0" for each in labels)]
    assert probe.parse_metrics(lines) == probe.EngineMetrics(running=1, kv_tokens=tokens)


NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info")
LINES = st.lists(st.builds(str.__add__, st.sampled_from(NAMES), st.text(max_size=40)), max_size=5)


@given(LINES)
@example([f"{NAMES[0]} 1e308"] * 2)
def test_any_metric_line_can_be_read(lines: list[str]) -> None:
    probe.parse_metrics(lines)


#: Pages as vLLM writes them, and what they say. Several engines: ``--api-server-count`` and ``--data-parallel-size``.
PAGES = {
    "vllm:num_requests_running 2.0\nvllm:num_requests_waiting 1.0\nvllm:kv_cache_usage_perc 0.5\n": (2, 1, 0.5),
    "vllm:num_requests_running 2\r\nvllm:num_requests_waiting 1\r\nvllm:gpu_cache_usage_perc 0.5\r\n": (2, 1, 0.5),
    "\n".join(
        (
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            'vllm:num_requests_running{engine="0",model_name="a b"} 3.0',
            'vllm:num_requests_running{engine="1",model_name="a b"} 4.0',
            'vllm:num_requests_waiting{engine="0",model_name="a b"} 0.0',
            'vllm:num_requests_waiting{engine="1",model_name="a b"} 6.0',
            'vllm:num_requests_waiting_by_reason{engine="1",model_name="a b",reason="capacity"} 6.0',
            'vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25',
            'vllm:kv_cache_usage_perc{engine="1",model_name="a b"} 0.75',
        )
    ): (7, 6, 0.75),
    "vllm:num_requests_running 2\nvllm:num_requests_waiting 1": (2, 1, 0.0),
    "vllm:num_requests_running 1e300\nvllm:num_requests_waiting -3\nvllm:kv_cache_usage_perc 7": (0, 0, 1.0),
    "vllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.5": None,
    "vllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5": None,
    "vllm:demo 1.0\nsglang:num_running_reqs 3": None,
    "": None,
}


@pytest.mark.parametrize(("page", "load"), PAGES.items(), ids=range(len(PAGES)))
def test_how_busy_an_engine_is_stands_on_its_page_or_it_does_not(
    page: str, load: tuple[int, int, float] | None
) -> None:
    assert probe.parse_load(page.encode()) == load


@given(st.one_of(st.binary(max_size=80), LINES.map("\n".join).map(str.encode)))
@example(b"\n".join([b"vllm:num_requests_running 1e308", b"vllm:num_requests_waiting 1e308"] * 2))
@example(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc nan")
def test_any_page_says_how_busy_in_numbers_that_exist_or_nothing(page: bytes) -> None:
    load = probe.parse_load(page)
    assert load is None or (load.running >= 0 and load.waiting >= 0 and 0 <= load.kv_use <= 1)
