"""The emulated engine through a real HTTP client: what OpenAI's clients and a node rely on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from node.emulator import EngineConfig, Timing
from node.emulator.serve.server import EmulatedServer, ServeOptions
from node.engine.probe import parse_metrics, parse_models

MODEL = "demo"
CONFIG = EngineConfig(
    name="t",
    timing=Timing(step_s=0.001, prefill_s=1e-5),
    block_size=16,
    kv_tokens=4096,
    max_num_seqs=8,
    step_tokens=512,
    max_model_len=2048,
)
STORY = "All happy families are alike; each unhappy family is unhappy in its own way. " * 12


@pytest.fixture
async def server() -> AsyncIterator[EmulatedServer]:
    async with EmulatedServer(CONFIG, ServeOptions(models=(MODEL, "alias"))) as running:
        yield running
        running.engine.validate()


@pytest.fixture
async def client(server: EmulatedServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as made:
        yield made


async def get(server: EmulatedServer, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{server.port}{path}") as answer:
        return answer.status, await answer.read()


async def post(server: EmulatedServer, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{server.port}{path}", json=body) as answer,
    ):
        return answer.status, await answer.read()


def events(raw: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": STORY}], "max_tokens": 12, **fields}


async def test_a_chat_answers_the_same_text_whole_and_streamed(server: EmulatedServer, client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**chat(), extra_body={"ignore_eos": True})
    stream = await client.chat.completions.create(
        **chat(), extra_body={"ignore_eos": True}, stream=True, stream_options={"include_usage": True}
    )
    pieces = [event async for event in stream]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content and len(text.split()) == 12
    assert whole.choices[0].finish_reason == "length" == pieces[-2].choices[0].finish_reason
    assert pieces[0].choices[0].delta.role == "assistant"
    usage = pieces[-1].usage
    assert usage is not None and usage.completion_tokens == 12
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens % 16 == 0


async def test_a_stream_is_framed_as_vllm_frames_it(server: EmulatedServer) -> None:
    _, raw = await post(
        server, "/v1/chat/completions", chat(stream=True, max_tokens=2, ignore_eos=True, return_token_ids=True)
    )
    opening, first, last = events(raw)
    assert opening["object"] == "chat.completion.chunk" and opening["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
    }
    assert len(opening["prompt_token_ids"]) > 16
    assert first["choices"][0]["finish_reason"] is None and len(first["choices"][0]["token_ids"]) == 1
    assert last["choices"][0]["finish_reason"] == "length" and last["choices"][0]["stop_reason"] is None


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_with_the_beginning_of_its_answer_continues_it(server: EmulatedServer, as_ids: bool) -> None:
    body = {"model": MODEL, "prompt": "It was", "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    whole = json.loads((await post(server, "/v1/completions", body))[1])["choices"][0]
    cut = 11
    ids = whole["prompt_token_ids"] + whole["token_ids"][:cut]
    text = "It was" + " ".join(["", *whole["text"].split()[:cut]])
    body |= {"prompt": ids if as_ids else text, "max_tokens": 30 - cut}
    rest = json.loads((await post(server, "/v1/completions", body))[1])["choices"][0]
    assert rest["token_ids"] == whole["token_ids"][cut:]
    assert text.removeprefix("It was") + rest["text"] == whole["text"]


async def test_several_choices_differ_and_are_counted_together(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**chat(n=3), extra_body={"ignore_eos": True})
    texts = {choice.message.content for choice in answer.choices}
    assert len(texts) == 3 and [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None and answer.usage.completion_tokens == 36


async def test_a_stop_string_ends_the_answer_before_itself(server: EmulatedServer, client: AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="x", max_tokens=20, extra_body={"ignore_eos": True})
    text = whole.choices[0].text
    stop = text[12:18]
    for stream in (False, True):
        body = {"model": MODEL, "prompt": "x", "max_tokens": 20, "ignore_eos": True, "stop": [stop], "stream": stream}
        _, raw = await post(server, "/v1/completions", body)
        answers = events(raw) if stream else [json.loads(raw)]
        assert "".join(answer["choices"][0]["text"] for answer in answers) == text[: text.index(stop)]
        assert answers[-1]["choices"][0]["finish_reason"] == "stop"
        assert answers[-1]["choices"][0]["stop_reason"] == stop


async def test_several_prompts_are_answered_in_order(client: AsyncOpenAI) -> None:
    single = [
        (await client.completions.create(model=MODEL, prompt=p, max_tokens=4)).choices[0].text for p in ("a", "b")
    ]
    both = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=4)
    assert [choice.text for choice in both.choices] == single


async def test_errors_are_those_of_vllm(client: AsyncOpenAI, server: EmulatedServer) -> None:
    with pytest.raises(NotFoundError, match="The model `other` does not exist"):
        await client.chat.completions.create(**chat(model="other"))
    with pytest.raises(BadRequestError, match="maximum context length is 2048 tokens"):
        await client.completions.create(model=MODEL, prompt=[1] * 3000, max_tokens=1)
    with pytest.raises(BadRequestError, match="you requested 2000 output tokens"):
        await client.completions.create(model=MODEL, prompt=[1] * 100, max_tokens=2000)
    for body in (
        {"prompt": []},
        {"prompt": {"a": 1}},
        {"prompt": [-1]},
        {"prompt": "a", "n": 0},
        {"prompt": "a", "stop": [""]},
    ):
        status, raw = await post(server, "/v1/completions", body)
        error = json.loads(raw)["error"]
        assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert (await post(server, "/v1/nothing", {}))[0] == 404


async def test_messages_that_are_nested_without_end_are_refused(server: EmulatedServer) -> None:
    deep: Any = "x"
    for _ in range(600):
        deep = [deep]
    for path in ("/v1/chat/completions", "/tokenize"):
        status, body = await post(server, path, {"model": MODEL, "messages": deep})
        assert status == 400 and b"nested too deeply" in body


async def test_a_client_that_goes_away_aborts_its_request(server: EmulatedServer) -> None:
    assert server.driver is not None
    aborted, abort = asyncio.Event(), server.driver.abort

    def noted(rid: str) -> bool:
        aborted.set()
        return abort(rid)

    server.driver.abort = noted  # type: ignore[method-assign]
    body = json.dumps(chat(stream=True, max_tokens=1700, ignore_eos=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(60):
        await reader.readuntil(b"data: ")
    assert server.engine.running == 1
    writer.transport.abort()
    async with asyncio.timeout(60):
        await aborted.wait()
    assert server.engine.counts.generated < 1700 and server.engine.counts.finished_requests == 0
    _, page = await get(server, "/metrics")
    assert b'finished_reason="abort"} 1.0' in page


async def test_the_node_reads_its_models_and_metrics(server: EmulatedServer, client: AsyncOpenAI) -> None:
    for _ in range(2):
        await client.chat.completions.create(**chat())
    _, cards = await get(server, "/v1/models")
    assert [(model.id, model.max_model_len) for model in parse_models(cards)] == [(MODEL, 2048), ("alias", 2048)]
    _, page = await get(server, "/metrics")
    figures = parse_metrics(page.decode().splitlines())
    assert figures is not None and figures.prompt_tokens > 400
    assert figures.kv_tokens == server.engine.config.blocks * server.engine.config.block_size
    assert figures.prefix_hits > 150 and figures.prefix_queries == figures.prompt_tokens
    assert b"vllm:time_to_first_token_seconds_count" in page
    assert (await get(server, "/health"))[0] == 200


async def test_tokenize_and_detokenize_are_inverse(server: EmulatedServer) -> None:
    _, raw = await post(server, "/tokenize", {"model": MODEL, "prompt": STORY})
    answer = json.loads(raw)
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 2048
    _, raw = await post(server, "/detokenize", {"model": MODEL, "tokens": answer["tokens"]})
    assert json.loads(raw)["prompt"] == STORY


async def test_time_passes_as_the_model_says_and_faster_with_speedup() -> None:
    timing = Timing(step_s=0.5, prefill_s=1e-5)
    config = EngineConfig(name="t", timing=timing, step_tokens=512)
    async with EmulatedServer(config, ServeOptions(models=(MODEL,), speedup=50)) as server:
        begun = asyncio.get_running_loop().time()
        body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
        assert (await post(server, "/v1/completions", body))[0] == 200
        took = asyncio.get_running_loop().time() - begun
    assert took >= 10 * 0.5 / 50  # and not 5 s: a slow machine only makes it longer
    assert took < 2.5
