"""How often a stream may be carried: what a request can be the cause of, and what it cannot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.models import ModelInfo
from node.plan import Refusal, RouteOptions
from node.prompt import parse_request
from node.relay.attempts import MAX_BROKEN, Attempts
from node.relay.call import Call, Opened
from node.relay.carry import ahead
from node.relay.carry.ahead import FINE_TOKENS, SUFFIX, Stage
from node.relay.carry.carrier import Carrier
from node.relay.carry.continuation import CannotCarryError
from node.relay.carry.lost import Lost
from node.relay.refused import Refused
from node.relay.upstream import UpstreamBrokenError
from tests.node.carry.building import completion


def carrier(*, gathered: bool = False) -> Carrier:
    """Of a request that every node would take."""
    body = json.dumps(
        {"model": "m", "prompt": "x", "stream": not gathered, "temperature": 0, "max_tokens": 99}
    ).encode()
    parsed = parse_request("/v1/completions", body)
    call = Call("POST", "/v1/completions", [], parsed, "r", RouteOptions(rid="r"), 0.0)

    async def opened(attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        return cast(Opened, SimpleNamespace(upstream=SimpleNamespace(status=200))), lambda whole: None

    made: Any = Carrier(call, Attempts(call), opened, lambda: 0.0)
    return cast(Carrier, made)


async def test_nodes_that_fall_silent_are_not_held_against_a_request() -> None:
    stream = carrier()
    for number in range(MAX_BROKEN + 2):
        assert await stream.next_leg(Lost(f"n{number}", "silent", "nothing came from it")) is not None


@pytest.mark.parametrize("cause", ["broken", "engine", "stalled", "garbage"])
async def test_a_request_that_loses_its_engines_otherwise_is_given_up(cause: str) -> None:
    stream = carrier()
    for number in range(MAX_BROKEN - 1):
        assert await stream.next_leg(Lost(f"n{number}", cause, "it broke")) is not None
    with pytest.raises(CannotCarryError, match="as many nodes as may be tried"):
        await stream.next_leg(Lost("last", cause, "it broke"))


# --- before a move


class Engines:
    """Opens every attempt at `c`, whose engine keeps blocks of so many tokens."""

    def __init__(self, block: int = 0, fault: Exception | None = None) -> None:
        self.block = block
        self.fault = fault
        self.sent: list[tuple[str, dict[str, Any], RouteOptions]] = []
        body = json.dumps({"model": "m", "prompt": "x", "stream": True, "temperature": 0, "max_tokens": 500}).encode()
        parsed = parse_request("/v1/completions", body)
        call = Call("POST", "/v1/completions", [], parsed, "r", RouteOptions(rid="r"), 0.0, carries=True)
        self.stream = Carrier(call, Attempts(call), self._open, lambda: 0.0)
        self.stream.record.take(completion("a", [1], prompt=list(range(100))))

    async def _open(self, attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        info = ModelInfo("m", block_size=self.block)
        view: Any = SimpleNamespace(get=lambda name: SimpleNamespace(models={"m": info}))
        plan: Any = SimpleNamespace(target="c", model="m")
        assert attempt.fit is not None
        call = attempt.fit(plan, view)
        self.sent.append((call.rid, json.loads(call.parsed.body), attempt.options(0.0)))
        if self.fault is not None:
            raise self.fault

        async def read_all(most: int) -> bytes:
            return b""

        upstream = SimpleNamespace(status=200, read_all=read_all)
        return cast(Opened, SimpleNamespace(upstream=upstream, plan=plan, end=lambda whole: None)), lambda whole: None

    def say(self, tokens: int) -> None:
        """The old engine goes on."""
        for token in range(tokens):
            self.stream.record.take(completion("b", [token]))


async def test_before_a_move_the_next_node_computes_what_is_there_and_then_goes_on_with_it() -> None:
    engines = Engines()
    assert await engines.stream.prepare("b")
    (rid, body, options), *more = engines.sent
    assert not more and rid == "r" + SUFFIX and options.visited == ("b",) and options.force_target is None
    assert body["prompt"] == [*range(100), 1] and body["max_tokens"] == 1
    engines.say(3)
    assert await engines.stream.next_leg(Lost("b", "moved", "asked to")) is not None
    rid, body, options = engines.sent[-1]
    assert rid == "r" and options.force_target == "c" and options.no_pull
    assert body["prompt"] == [*range(100), 1, 0, 1, 2]
    assert body["max_tokens"] == 496


async def test_the_end_of_a_large_block_is_waited_for_and_computed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(block=128)
    looks = 0

    async def until(reached: Callable[[], bool], limit_s: float) -> bool:
        nonlocal looks
        while not reached():
            looks += 1
            engines.say(1)
        return True

    monkeypatch.setattr("node.relay.carry.carrier.until", until)
    assert await engines.stream.prepare("b")
    assert [len(body["prompt"]) for _, body, _ in engines.sent] == [101, 128] and looks == 27


async def test_an_end_that_does_not_come_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(block=128)
    monkeypatch.setattr("node.relay.carry.carrier.ALIGN_S", 0.0)
    assert await engines.stream.prepare("b") and len(engines.sent) == 1


@pytest.mark.parametrize("block", [0, 16, FINE_TOKENS])
async def test_small_blocks_are_not_waited_for(block: int) -> None:
    engines = Engines(block=block)
    assert await engines.stream.prepare("b") and len(engines.sent) == 1


async def test_a_stream_that_has_all_its_tokens_needs_nothing_computed() -> None:
    engines = Engines()
    engines.stream.record.take(completion("", [9], finish="length"))
    assert await engines.stream.prepare("b") and not engines.sent


async def test_a_stream_stays_where_nobody_has_a_place_for_it() -> None:
    engines = Engines(fault=Refused(Refusal(429, "cluster_busy", "full")))
    assert not await engines.stream.prepare("b")


async def test_a_stream_stays_where_the_next_node_could_not_compute_it() -> None:
    """It goes on where it is, and is asked again: the other one may be slow, or break."""
    engines = Engines(fault=UpstreamBrokenError("it broke"))
    assert not await engines.stream.prepare("b")
    engines.fault = None
    assert await engines.stream.next_leg(Lost("b", "broken", "it is gone")) is not None
    assert engines.sent[-1][2].force_target is None


async def test_no_more_moves_than_allowed_are_prepared_at_a_time() -> None:
    turns, held, went = asyncio.Semaphore(1), asyncio.Event(), []

    async def prepare() -> bool:
        await held.wait()
        return True

    moves = [ahead.Move(turns) for _ in range(3)]
    for number, move in enumerate(moves):
        for _ in range(2):  # asked twice, it is one move
            move.begin(prepare, lambda number=number: went.append(number))  # type: ignore[misc]
    await asyncio.sleep(0)
    assert turns.locked() and not went
    moves[1].cancel()
    held.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert went == [0, 2]


async def test_where_the_next_node_has_no_place_any_more_any_other_goes_on() -> None:
    engines = Engines()
    assert await engines.stream.prepare("b")
    engines.fault = Refused(Refusal(429, "cluster_busy", "full"))
    with pytest.raises(Refused):
        await engines.stream.next_leg(Lost("b", "moved", "asked to"))
    assert [options.force_target for _, _, options in engines.sent[1:]] == ["c", None]


def test_what_an_engine_has_to_compute_is_what_lies_behind_its_last_whole_block() -> None:
    assert Stage("c", 128, 300).tail(310) == 54 and Stage("c", 128, 300).next_end == 384
    assert Stage("c", 0, 300).tail(310) == 10 and Stage("c", 128, 384).tail(384) == 0
    assert ahead.STAGE_S > ahead.PLACE_S


async def test_the_tokenizer_of_whoever_was_lost_is_not_asked() -> None:
    """It may hang as the stream did."""
    engines = Engines()
    engines.stream.record.take(completion("bb", [2, 3]))  # two tokens in one event: the tokenizer has to be asked
    asked: list[tuple[str, ...]] = []

    async def opened(attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        asked.append(attempt.options(0.0).visited)
        raise Refused(Refusal(503, "no_live_node", "nobody"))

    engines.stream._open = opened  # type: ignore[method-assign]
    with pytest.raises((CannotCarryError, Refused)):
        await engines.stream.next_leg(Lost("b", "stalled", "it hangs"))
    assert asked[0] == ("b",), "who is named there must be a node"


# --- answers that are gathered


def gatherer(**fields: Any) -> Engines:
    """Of a completion that is not streamed. Nothing of it was taken yet."""
    engines = Engines()
    body = json.dumps({"model": "m", "prompt": "x", "temperature": 0, "max_tokens": 500, **fields}).encode()
    call = Call("POST", "/v1/completions", [], parse_request("/v1/completions", body), "r", RouteOptions(), 0.0)
    engines.stream = Carrier(call, Attempts(call), engines._open, lambda: 0.0)
    return engines


async def test_a_gathered_answer_goes_on_as_the_stream_that_it_is() -> None:
    engines = gatherer(stop=["z"], include_stop_str_in_output=True)
    engines.stream.record.take(completion("a", [1], prompt=list(range(100))))
    assert await engines.stream.next_leg(Lost("b", "broken", "it broke")) is not None
    _, body, _ = engines.sent[-1]
    assert body["prompt"] == [*range(100), 1] and body["max_tokens"] == 499
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}


async def test_what_was_gathered_is_thrown_away_where_it_cannot_go_on() -> None:
    """No client has it: a second run need not say the same."""
    stream = carrier(gathered=True)
    stream.record.take(completion("a", None))  # no ids
    assert "token ids" in stream.why_not()  # it does not move: that would begin anew without need
    before = stream.record
    leg = await stream.next_leg(Lost("b", "broken", "it broke"))
    assert leg is not None and leg.translator is stream.record is not before
    assert not stream.record.begun


async def test_what_would_begin_anew_is_not_prepared_for_a_move() -> None:
    engines = gatherer()
    engines.stream.record.take(completion("a", [1]))  # without the ids of the prompt
    assert not await engines.stream.prepare("b")


async def test_token_ids_that_no_client_has_need_not_come_again() -> None:
    engines = gatherer(return_token_ids=True)
    engines.stream.record.take(completion("a", [1], prompt=list(range(100))))
    engines.stream.record.take(completion("", [2]))  # half a character: computed again
    leg = await engines.stream.next_leg(Lost("b", "broken", "it broke"))
    assert leg is not None
    leg.translator.take(completion("b", [3]))
    assert list(engines.stream.record.choices[0].ids) == [1, 3]
