"""The process of one host of `tests.gossip.netns`: an agent with zeroconf and no seeds. NAME HOST PORT INCARNATION
INTERFACES: the last is the address of the one interface where it looks for peers, or `all`.

A line `{"want": {name: [state, ...]}, "hosts": {name: ip}, "within_s": s}` is answered once that holds, or is overdue.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from gossip import GossipAgent, GossipConfig, GossipEvent, Identity, MemberChanged
from gossip.discovery import MdnsDiscovery


class Host:
    """The agent, and what it has told."""

    def __init__(self, name: str, host: str, port: int, incarnation: int) -> None:
        self._told = asyncio.Event()
        #: (name, state) of every change, oldest first.
        self.seen: list[tuple[str, str]] = []
        identity = Identity(name, "netns", incarnation, host, port)
        self.agent = GossipAgent(identity, GossipConfig.lan(), listener=self._hear)

    def _hear(self, event: GossipEvent) -> None:
        if isinstance(event, MemberChanged):
            self.seen.append((event.view.name, event.view.state.value))
            self._told.set()

    def members(self) -> dict[str, list[Any]]:
        """Who is what, where, in which boot."""
        return {m.name: [m.state.value, m.host, m.incarnation] for m in self.agent.members()}

    async def wait(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer one line."""
        holds = True
        try:
            async with asyncio.timeout(question["within_s"]):
                while not self._holds(question["want"], question["hosts"]):
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            holds = False
        return {"holds": holds, "members": self.members(), "seen": self.seen}

    def _holds(self, want: dict[str, list[str]], hosts: dict[str, str]) -> bool:
        members = self.members()
        if members.keys() != want.keys():
            return False
        return all(members[name][0] in states and members[name][1] == hosts[name] for name, states in want.items())


async def serve(name: str, host: str, port: str, incarnation: str, interfaces: str) -> None:
    """Run until standard input ends."""
    this = Host(name, host, int(port), int(incarnation))
    await this.agent.start()
    discovery = MdnsDiscovery(this.agent.identity, interfaces=None if interfaces == "all" else [interfaces])
    await discovery.start(lambda peer: this.agent.add_seeds([peer]))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await this.wait(json.loads(line))), flush=True)
    await discovery.close()
    await this.agent.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:6]))
