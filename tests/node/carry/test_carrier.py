"""How often a stream may be carried: what a request can be the cause of, and what it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.plan import RouteOptions
from node.prompt import parse_request
from node.relay.attempts import MAX_BROKEN, Attempts
from node.relay.call import Call, Opened
from node.relay.carry.carrier import Carrier
from node.relay.carry.continuation import CannotCarryError
from node.relay.carry.lost import Lost


def carrier() -> Carrier:
    """Of a request that every node would take."""
    body = json.dumps({"model": "m", "prompt": "x", "stream": True, "temperature": 0}).encode()
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
