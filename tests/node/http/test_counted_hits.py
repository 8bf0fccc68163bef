"""A node whose engine has no connector compares what it promised with what the engine counts."""

from __future__ import annotations

from node.hits import ENOUGH
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import Cluster
from tests.node.http.bodies import CHAT, chat

LONG = chat(messages=[{"role": "user", "content": "a long beginning " * 400}])


async def test_prompts_that_are_never_found_raise_the_alarm(nodes: Cluster) -> None:
    member = await nodes.add("a")
    node = member.node
    member.fake.metrics_text = 'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 7.0\n'
    await node.hit_reader.turn()
    for _ in range(ENOUGH + 1):  # the first one is promised nothing
        assert (await ask(member.port, "POST", CHAT, (), LONG)).status == 200
    await node.hit_reader.turn()
    assert node.metrics.hits.alarm
    assert b"grapevine_silent_zero_hits 1.0" in (await ask(member.port, "GET", "/metrics", (), b"")).body
