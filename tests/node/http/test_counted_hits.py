"""A node whose engine has no connector compares what it promised with what the engine counts."""

from __future__ import annotations

import pytest

from node.hits import ENOUGH
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import Cluster
from tests.node.http.bodies import CHAT, chat
from tests.waiting import until

LONG = chat(messages=[{"role": "user", "content": "a long beginning " * 400}])
PAGE = (
    "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
    'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 7.0\n'
)


async def test_prompts_that_are_never_found_raise_the_alarm(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for often in ("node.engine.pace.EVERY_S", "node.onlooker.EVERY_S", "node.onlooker.HITS_EVERY_S"):
        monkeypatch.setattr(often, 0.01)
    member = await nodes.add("a")
    node = member.node
    member.fake.metrics_text = PAGE
    await until(lambda: not node.kv.counted.wanted)
    for _ in range(ENOUGH + 1):  # the first one is promised nothing
        assert (await ask(member.port, "POST", CHAT, (), LONG)).status == 200
    await until(lambda: node.metrics.hits.alarm)
    assert b"grapevine_silent_zero_hits 1.0" in (await ask(member.port, "GET", "/metrics", (), b"")).body
