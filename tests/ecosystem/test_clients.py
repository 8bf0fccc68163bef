"""Programs that people have already, from their real packages, against a node that forwards all of it to another."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from node.model_store import ensure_default_model
from tests.ecosystem.forwarded import MODEL, OTHER, Forwarded, forwarded

CALLS = Path(__file__).parent / "calls"
#: What `scripts/test` makes of requirements/clients.txt.
CLIENTS = Path(sys.prefix) / "clients" / "bin" / "python"
#: Seconds for one program; most of it is importing on a busy machine.
LIMIT_S = 300.0
MESSAGES: Any = [{"role": "user", "content": "Name a river."}]
needs_clients = pytest.mark.skipif(not CLIENTS.exists(), reason=f"no {CLIENTS}: scripts/test makes it")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Forwarded]:
    async with forwarded(tmp_path) as running:
        yield running
        done = await running.decisions()
        assert {told["target"] for told in done if told["status"] == 200} == {"target"}, "all of it was forwarded"


async def output_of(*command: str | Path) -> str:
    """Run a program; its output, when it ends well."""
    # Nothing of this tree is to be found there, no proxy, and no network beside the node.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "proxy" not in name.lower()}
    env |= {"HF_HUB_OFFLINE": "1", "LANGSMITH_TRACING": "false", "VLLM_NO_USAGE_STATS": "1"}
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, told.decode()[-4000:] + out.decode()[-2000:]
    return out.decode()


async def test_the_official_client(pair: Forwarded) -> None:
    async with AsyncOpenAI(base_url=pair.url, api_key="none", max_retries=0) as api:
        assert [model.id async for model in api.models.list()] == [MODEL, OTHER]
        assert (await api.models.retrieve(MODEL)).id == MODEL
        whole = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
        assert whole.usage is not None and whole.usage.completion_tokens <= 12
        stream = await api.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content and len(chunks) > 5
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        plain = await api.completions.create(model=MODEL, prompt=["One two", "three"], max_tokens=5, n=2)
        assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]
        raw = await api.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=2, extra_headers={"X-Request-Id": "mine"}
        )
        assert raw.headers["x-grapevine-target"] == "target" and raw.request_id == "mine"
        with pytest.raises(openai.NotFoundError, match="nobody-has-it"):
            await api.chat.completions.create(model="nobody-has-it", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError):
            await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=100_000)


@needs_clients
async def test_langchain(pair: Forwarded) -> None:
    told = json.loads(await output_of(CLIENTS, CALLS / "langchain_calls.py", pair.url, MODEL))
    assert told["whole"] and told["whole"] == told["streamed"] == told["chain"]
    assert told["pieces"] > 5 and told["finish"] in ("length", "stop")
    assert told["usage"]["output_tokens"] == told["streamed_usage"]["output_tokens"] > 0
    assert all(told["batch"]) and len(set(told["together"])) == 8
    assert told["completion"] and told["completion"] == told["completion_streamed"]
    assert "nobody-has-it" in told["error"]


@needs_clients
async def test_llamaindex(pair: Forwarded) -> None:
    told = json.loads(await output_of(CLIENTS, CALLS / "llamaindex_calls.py", pair.url, MODEL))
    assert told["whole"]
    assert told["whole"] == told["streamed"] == told["awaited"] == told["awaited_stream"]
    assert told["predicted"] and told["completion"] == told["completion_streamed"] != ""


async def test_vllm_bench_serve(pair: Forwarded, tmp_path: Path) -> None:
    model = await asyncio.to_thread(ensure_default_model, print)
    await output_of(
        sys.executable, CALLS / "vllm_cli.py", "bench", "serve",
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", pair.url.removesuffix("/v1"),
        "--model", MODEL, "--tokenizer", model, "--dataset-name", "random", "--random-input-len", "64",
        "--random-output-len", "16", "--num-prompts", "24", "--max-concurrency", "8", "--ignore-eos", "--disable-tqdm",
        "--save-result", "--result-dir", tmp_path, "--result-filename", "told.json",
    )  # fmt: skip
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["completed"], told.get("failed", 0)) == (24, 0)
    assert told["total_output_tokens"] == 24 * 16 and told["mean_ttft_ms"] > 0


async def test_open_webui_finds_its_models_and_streams_from_its_server_and_from_the_browser(tmp_path: Path) -> None:
    """Its package is several gigabytes: these are the requests that its sources make, with its headers."""
    page = "http://localhost:3000"
    key = {"Authorization": "Bearer k", "Content-Type": "application/json"}
    async with (
        forwarded(tmp_path, api_key=("k",), cors_origin=(page,)) as pair,
        aiohttp.ClientSession(trust_env=True) as session,
    ):
        async with session.get(pair.url + "/models", headers=key) as answer:
            told = await answer.json()
        assert [card["id"] for card in told["data"]] == [MODEL, OTHER]
        assert all({"id", "object", "owned_by"} <= set(card) for card in told["data"])
        async with session.get(pair.url + "/models", headers={"Authorization": "Bearer wrong"}) as answer:
            assert answer.status == 401 and (await answer.json())["error"]["message"]
        asked = {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 8}
        for origin in ({}, {"Origin": page}):
            async with session.post(pair.url + "/chat/completions", json=asked, headers=key | origin) as answer:
                assert answer.status == 200 and "text/event-stream" in answer.headers["Content-Type"]
                assert answer.headers.get("Access-Control-Allow-Origin") == origin.get("Origin")
                lines = (await answer.text()).split("\n\n")
            assert lines[-2] == "data: [DONE]"
            assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        for path, method in (("/models", "GET"), ("/chat/completions", "POST")):
            wanted = {
                "Origin": page,
                "Access-Control-Request-Method": method,
                "Access-Control-Request-Headers": "authorization,content-type",
            }
            async with session.options(pair.url + path, headers=wanted) as answer:
                assert answer.status == 204 and answer.headers["Access-Control-Allow-Origin"] == page
                assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
