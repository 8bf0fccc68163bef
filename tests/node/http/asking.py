"""Reading an error, and filling a node."""

from __future__ import annotations

import asyncio
import json

from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask
from tests.node.fakes.cluster import Member
from tests.node.fakes.engine import Gate
from tests.node.http.bodies import CHAT, chat


def error_of(answer: RawAnswer) -> dict[str, object]:
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


async def fill(member: Member, gate: Gate, count: int = 1) -> list[asyncio.Task[RawAnswer]]:
    """Occupy places of a node with its own clients until the gate opens."""
    member.fake.script = fake.hold(gate)
    forced = (("x-grapevine-force-target", member.name),)
    tasks = [asyncio.create_task(ask(member.port, "POST", CHAT, forced, chat())) for _ in range(count)]
    await member.fake.until(lambda: member.fake.active == count)
    return tasks
