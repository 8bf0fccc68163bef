"""A stream survives what runs it: engine or node is killed or stopped in its middle, and the client sees a pause.

Greedy answers of float32 engines: the text must be that of a run that nobody disturbed.
"""

import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from localcluster import ENGINE_START_LIMIT_S

from tests.e2e.client import MODEL, Client, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

CUT_AFTER = 25
"""Events with text before the fault."""
TOKENS = 80
HANG_COSTS_S = 5.0
"""What a hang should cost at most; printed beside what it cost, since a slow machine is no failure."""
NEVER_S = 45.0
"""Longer than this and the watchdog did not work."""
QUESTION = "Tell me a long story about a lighthouse keeper and the sea."


@dataclass(slots=True)
class Stream:
    """What a client saw of one streamed answer."""

    headers: dict[str, str]
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    raw: bytes = b""

    @property
    def text(self) -> str:
        choices = [choice for event in self.events for choice in event["choices"]]
        return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices)

    @property
    def ids(self) -> set[str]:
        return {event["id"] for event in self.events}

    @property
    def usage(self) -> dict[str, Any]:
        return {key: self.events[-1]["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}

    @property
    def finish(self) -> tuple[object, object]:
        last = [choice for event in self.events for choice in event["choices"]][-1]
        return last["finish_reason"], last.get("stop_reason")

    @property
    def pause_s(self) -> float:
        return max(later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False))


async def ask(
    client: Client, target: str, path: str, body: dict[str, Any], fault: Callable[[], None] | None = None
) -> Stream:
    """Ask `red` for an answer that `target` runs; after `CUT_AFTER` events with text, the fault."""
    sent = {"model": MODEL, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    headers = {"x-grapevine-force-target": target}
    async with client.session.post(client.cluster["red"].url + path, json=sent, headers=headers) as response:
        assert response.status == 200, await response.text()
        stream = Stream({key.lower(): value for key, value in response.headers.items()})
        async for event in _events(response.content, stream):
            stream.events.append(event)
            stream.times.append(time.monotonic())
            assert "error" not in event, event
            if fault is not None and len(stream.times) == CUT_AFTER:
                fault()
    assert stream.headers["x-grapevine-target"] == target
    assert stream.raw.endswith(b"data: [DONE]\n\n")
    return stream


async def _events(content: Any, stream: Stream) -> AsyncIterator[dict[str, Any]]:
    async for line in content:
        stream.raw += line
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, **more}


async def ready(client: Client, *names: str) -> None:
    async def all_ready() -> bool:
        members = [await client.member("red", name) for name in names]
        return all(m and m["state"] == "alive" and (m["load"] or {}).get("ready") for m in members)

    for name in names:
        if not client.cluster[name].running:
            await client.cluster.start(name)
    await until(all_ready, ENGINE_START_LIMIT_S, f"{names} are ready")


def core_of(client: Client, name: str) -> psutil.Process:
    node = client.cluster[name].process
    assert node is not None
    below = psutil.Process(node.pid).children(recursive=True)
    return next(p for p in below if "EngineCore" in " ".join([p.name(), *p.cmdline()]))


async def same(client: Client, what: str, whole: Stream, carried: Stream) -> None:
    """The carried answer is the undisturbed one; tells the pause."""
    print(f"{what}: pause {carried.pause_s:.2f} s (a hang should cost at most {HANG_COSTS_S:.0f} s)")
    log = client.cluster["red"].log.read_text().splitlines()
    print(*[line for line in log if "carried a stream" in line][-1:])
    assert carried.text == whole.text
    assert len(carried.ids) == 1
    assert carried.usage == whole.usage
    assert carried.finish == whole.finish
    assert b'token_ids":[' not in carried.raw
    assert await client.metric("red", "grapevine_carries_total") >= 1


def stop_string(answer: Stream) -> str:
    """Text of three tokens behind the fault, that does not come before them."""
    pieces = [choice["text"] for event in answer.events for choice in event["choices"]]
    for at in range(CUT_AFTER + 10, len(pieces) - 3):
        stop = "".join(pieces[at : at + 3])
        if len(stop) > 6 and answer.text.find(stop) == len("".join(pieces[:at])):
            return stop
    raise AssertionError(f"an answer that only repeats itself: {answer.text!r}")


async def test_a_hung_engine_costs_a_chat_only_a_pause(client: Client) -> None:
    await ready(client, "red", "green", "blue")
    whole = await ask(client, "green", "/v1/chat/completions", chat())
    core = core_of(client, "green")
    try:
        carried = await ask(client, "green", "/v1/chat/completions", chat(), lambda: core.send_signal(signal.SIGSTOP))
    finally:
        core.send_signal(signal.SIGCONT)
    await same(client, "engine stopped", whole, carried)
    assert carried.pause_s <= NEVER_S
    await ready(client, "green")


async def test_a_seeded_chat_runs_again_and_is_not_told_twice(client: Client) -> None:
    await ready(client, "red", "green", "blue")
    asked = chat(temperature=0.8, seed=7)
    whole = await ask(client, "green", "/v1/chat/completions", asked)
    core = core_of(client, "green")
    try:
        carried = await ask(client, "green", "/v1/chat/completions", asked, lambda: core.send_signal(signal.SIGSTOP))
    finally:
        core.send_signal(signal.SIGCONT)
    await same(client, "engine stopped, run again", whole, carried)
    await ready(client, "green")


async def test_a_killed_engine_costs_a_completion_with_stop_strings_only_a_pause(client: Client) -> None:
    await ready(client, "red", "green", "blue")
    prompt = {
        "prompt": "Once upon a time there was a lighthouse. " + QUESTION,
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    stop = stop_string(await ask(client, "blue", "/v1/completions", prompt))
    whole = await ask(client, "blue", "/v1/completions", {**prompt, "stop": [stop, "never said"]})
    assert whole.finish == ("stop", stop)
    core = core_of(client, "green")
    carried = await ask(client, "green", "/v1/completions", {**prompt, "stop": [stop, "never said"]}, core.kill)
    await same(client, "engine killed", whole, carried)


async def test_a_stopped_node_costs_a_chat_only_a_pause(client: Client) -> None:
    await ready(client, "red", "blue")
    node = client.cluster["blue"]
    whole = await ask(client, "blue", "/v1/chat/completions", chat())
    try:
        carried = await ask(client, "blue", "/v1/chat/completions", chat(), lambda: node.kill(signal.SIGSTOP))
    finally:
        node.kill(signal.SIGCONT)
    await same(client, "node stopped", whole, carried)
    assert carried.pause_s <= NEVER_S


async def test_a_killed_node_costs_a_chat_only_a_pause(client: Client) -> None:
    await ready(client, "red", "blue")
    whole = await ask(client, "blue", "/v1/chat/completions", chat())
    carried = await ask(client, "blue", "/v1/chat/completions", chat(), client.cluster["blue"].kill)
    await same(client, "node killed", whole, carried)
