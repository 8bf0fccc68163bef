"""The process of the real agent: `NAME HOST PORT SEED_PORT NODES`. Answers `state` lines on standard input."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from benches.gossip_scenarios import ROW_BYTES, ROW_EVERY_S
from gossip import GossipAgent, GossipConfig, GossipEvent, Identity, MemberState


class Publisher:
    """Sets the row as a node does, and counts what the agent tells."""

    def __init__(self) -> None:
        self.told = 0

    def hear(self, event: GossipEvent) -> None:
        """One event of the agent."""
        self.told += 1


async def serve(name: str, host: str, port: str, seed_port: str, size: str) -> None:
    """Take part, and answer."""
    publisher = Publisher()
    identity = Identity(name, "test", 1, host, int(port), meta=name.encode())
    agent = GossipAgent(identity, GossipConfig.lan(nodes=int(size)), listener=publisher.hear)
    await agent.start()
    agent.add_seeds([f"127.1.0.2:{seed_port}"])
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    publishing = asyncio.create_task(_publish(agent))
    while await reader.readline():
        print(json.dumps(_state(agent, publisher)), flush=True)
    publishing.cancel()
    await agent.close()


async def _publish(agent: GossipAgent) -> None:
    while True:
        agent.set_row(b"r" * ROW_BYTES)
        await asyncio.sleep(ROW_EVERY_S)


def _state(agent: GossipAgent, publisher: Publisher) -> dict[str, float]:
    members = agent.members()
    snapshot = agent.snapshot()
    return {
        "members": len(members),
        "alive": sum(m.state is MemberState.ALIVE for m in members) - 1,
        "rows": sum(agent.row(m.name) is not None for m in members) - 1,
        "broadcasts": snapshot["broadcasts_queued"],
        "malformed": snapshot["counters"].get("malformed", 0),
        "told": publisher.told,
        # Last: the questions above must not count.
        "cpu_s": time.process_time(),
    }


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:6]))
