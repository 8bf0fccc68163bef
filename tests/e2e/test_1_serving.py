"""Any node answers as one vLLM server would, whichever node's engine does the work."""

import asyncio
import contextlib
import json
import statistics
import subprocess
from pathlib import Path

import aiohttp
import openai
import pytest
from localcluster import GRAPEVINE, LocalCluster, LocalNode, free_ports
from openai import AsyncOpenAI

from tests.e2e.client import MODEL, NAMES, Client, events, prose, until
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_three_entries_give_the_same_greedy_answer(client: Client) -> None:
    replies = [await client.complete(name, "The capital of France is", max_tokens=12) for name in NAMES]
    assert {reply.status for reply in replies} == {200}
    assert len({reply.text for reply in replies}) == 1
    assert "Paris" in replies[0].text


async def test_each_engine_gives_the_same_greedy_answer_through_each_entry(client: Client) -> None:
    texts = set()
    for entry in NAMES:
        for target in NAMES:
            reply = await client.complete(
                entry, "Once upon a time, there was a", max_tokens=10, headers={"x-grapevine-force-target": target}
            )
            assert (reply.status, reply.target) == (200, target)
            texts.add(reply.text)
    assert len(texts) == 1


@pytest.mark.parametrize("target", ["red", "green"])
async def test_a_stream_arrives_chunk_by_chunk_at_home_and_through_a_forward(client: Client, target: str) -> None:
    reply = await client.complete(
        "red", "Count from one to fifty in words: one, two,", max_tokens=40,
        headers={"x-grapevine-force-target": target},
    )  # fmt: skip
    assert reply.target == target
    assert len(reply.times) > 20
    gaps = [later - earlier for earlier, later in zip(reply.times, reply.times[1:], strict=False)]
    # Pieces of one read are microseconds apart; an engine's step takes some milliseconds on any machine.
    assert statistics.median(gaps) > 0.001, "the answer came in one piece"


@pytest.mark.parametrize("entry", NAMES)
async def test_the_official_client_works_against_any_node(cluster: LocalCluster, entry: str) -> None:
    async with AsyncOpenAI(base_url=cluster[entry].url + "/v1", api_key="none", max_retries=0) as api:
        assert MODEL in [model.id async for model in api.models.list()]
        assert (await api.models.retrieve(MODEL)).id == MODEL
        chat = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
        )
        assert chat.choices[0].message.content
        assert chat.usage is not None
        assert chat.usage.completion_tokens <= 8
        stream = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces) == chat.choices[0].message.content
        text = await api.completions.create(model=MODEL, prompt="One two three", max_tokens=5, temperature=0)
        assert text.choices[0].text


@pytest.mark.parametrize("entry", NAMES)
async def test_errors_reach_the_official_client_as_its_own_kinds(cluster: LocalCluster, entry: str) -> None:
    async with AsyncOpenAI(base_url=cluster[entry].url + "/v1", api_key="none", max_retries=0) as api:
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            await api.completions.create(model="no-such-model", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await api.completions.create(model=MODEL, prompt="x", temperature=-5)
        with pytest.raises(openai.BadRequestError):
            await api.completions.create(model=MODEL, prompt=prose(99, 6000), max_tokens=5)


async def test_a_body_that_is_no_json_is_refused_with_400(client: Client) -> None:
    async with client.session.post(
        client.cluster["red"].url + "/v1/completions", data=b"{not json", headers={"content-type": "application/json"}
    ) as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]


async def test_other_paths_of_the_engine_are_routed_too(client: Client) -> None:
    async with client.session.post(
        client.cluster["blue"].url + "/tokenize", json={"model": MODEL, "prompt": "Hello there"}
    ) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["count"] >= 2


async def test_every_node_lists_all_three_with_vectors_younger_than_two_seconds(client: Client) -> None:
    for entry in NAMES:

        async def fresh(entry: str = entry) -> bool:
            members = (await client.state(entry))["members"]
            return all(member["load_age_s"] < 2.0 for member in members)

        await until(fresh, PATIENCE_S, f"{entry} has vectors younger than two seconds of all")
        members = {member["name"]: member for member in (await client.state(entry))["members"]}
        assert set(members) == set(NAMES)
        for member in members.values():
            assert member["state"] == "alive"
            assert member["load"]["ready"] is True
            assert MODEL in member["models"]
        assert all(members[name]["rtt_ms"] is not None for name in NAMES if name != entry)


async def test_the_command_line_shows_the_same_state(cluster: LocalCluster) -> None:
    command = [GRAPEVINE, "state", "--json", "--node", cluster["green"].url]
    run = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60, check=True)
    assert {member["name"] for member in json.loads(run.stdout)["members"]} == set(NAMES)


async def test_a_node_attaches_to_a_server_that_already_runs(client: Client, tmp_path: Path) -> None:
    """Any OpenAI-compatible server will do; here it is the cluster itself, seen from a node of another cluster."""
    (port,) = free_ports(1)
    engine = client.cluster["green"].url
    annex = LocalNode("annex", port, tmp_path, ("--no-mdns", "--cluster", "annex", "--engine-url", engine))
    await annex.start([], [])
    try:

        async def ready() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.session.get(annex.url + "/readyz") as response:
                    return response.status == 200
            return False

        await until(ready, PATIENCE_S, "the attached node is ready")
        async with AsyncOpenAI(base_url=annex.url + "/v1", api_key="none", max_retries=0) as api:
            assert [model.id async for model in api.models.list()] == [MODEL]
            answer = await api.completions.create(
                model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0
            )
            assert "Paris" in answer.choices[0].text
    finally:
        await annex.stop()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("target", ["red", "blue"])
async def test_a_client_that_disconnects_frees_the_target_engine(client: Client, target: str, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "Tell a very long story.", "max_tokens": 3000, "ignore_eos": True}

    async def running() -> float:
        return await client.metric(target, "vllm:num_requests_running")

    async def busy() -> bool:
        return await running() == 1

    async def idle() -> bool:
        return await running() == 0

    async def ask() -> None:
        async with client.session.post(
            client.cluster["red"].url + "/v1/completions", json={**body, "stream": stream},
            headers={"x-grapevine-force-target": target},
        ) as response:  # fmt: skip
            async for _ in events(response):
                pass

    request = asyncio.create_task(ask())
    await until(busy, PATIENCE_S, f"{target} runs the request")
    made = await client.metric(target, "vllm:generation_tokens_total")
    request.cancel()
    took = await until(idle, PATIENCE_S, f"{target} drops the request")
    made = await client.metric(target, "vllm:generation_tokens_total") - made
    print(f"dropped within {took:.1f} s, {made:.0f} tokens later")
    assert made < 1500, "the engine went on to the end of the answer"
