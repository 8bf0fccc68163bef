"""A cluster whose engines break where a test says, and what is looked at of answers that went on."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.node.fakes.cluster import Cluster, cluster
from tests.node.fakes.faulty import Decodes, FaultyEngine

#: Every way in which an engine breaks off.
KINDS = ("reset", "half", "garbage", "no answer", "error", "end")


@asynccontextmanager
async def breakable() -> AsyncIterator[Cluster]:
    """Three nodes, each with an engine whose streams a test can break. Nothing runs twice, and nothing is left."""
    decodes = Decodes()
    async with cluster() as whole:
        for name in ("a", "b", "c"):
            await whole.add(name, engine=FaultyEngine(whole.folder / f"{name}.fake", decodes=decodes))
        await whole.agree()
        yield whole
        for member in whole.members:
            await member.faulty.until_quiet()  # one that was left a moment ago hears of it now
        assert not decodes.doubled
        assert not decodes.open
        for member in whole.members:
            assert member.node.admission.active == 0
            assert member.node.handovers.running.movable == member.node.handovers.running.unmovable == 0


def normal(raw: bytes) -> bytes:
    """Without what differs from request to request: the time, and how much was cached."""
    raw = re.sub(rb'"created":\d+', b'"created":0', raw)
    return re.sub(rb',"prompt_tokens_details":(\{"cached_tokens":\d+[^}]*\}|null)', b"", raw)


def carried(nodes: Cluster, entry: str = "a") -> float:
    member = next(member for member in nodes.members if member.name == entry)
    page = member.node.metrics.page().decode()
    return sum(float(value) for value in re.findall(r'grapevine_carries_total\{[^}]*result="carried"\} (\S+)', page))
