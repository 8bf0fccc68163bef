"""`run`: one node as a process, from its settings to its exit status."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import uvloop

from gossip import GossipError
from kvmigrate.errors import KvError
from node import banner, logs
from node.assembly import Node
from node.collector import spare_collector
from node.errors import GrapevineError
from node.settings import Settings

__all__ = ["Node", "run"]

#: Exit statuses: ended as asked; could not start.
EXIT_OK = 0
EXIT_CANNOT_START = 1

_log = logging.getLogger("grapevine")


def run(settings: Settings, *, as_json: bool = False) -> int:
    """Run a node until SIGTERM, SIGINT or an administrator ends it. Returns the exit status.

    ``as_json``: what people are told goes out as one JSON object a line.
    """
    logs.set_up(settings)
    return uvloop.run(_run(settings, as_json))


async def _run(settings: Settings, as_json: bool) -> int:
    def say(line: str) -> None:
        _print(banner.told_json(line) if as_json else line)

    stop = asyncio.Event()
    node = Node(settings, on_leave=stop.set, say=say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _asked_to_stop, node, stop)
    _listen_for_hangup(loop, node, stop)
    try:
        await node.start()
    except (GrapevineError, GossipError, KvError) as error:
        sys.stderr.write(f"grapevine cannot start: {error}\n")
        return EXIT_CANNOT_START
    spare_collector()
    try:
        if not stop.is_set():
            up = banner.started(
                settings, http_port=node.http_port, gossip_address=node.gossip.address, kv_port=node.kv.port
            )
            _print(up.as_json() if as_json else "\n".join(up.lines()))
        await stop.wait()
        say(f"grapevine node {settings.name} is stopping (again to cut what still runs)")
    finally:
        await node.stop()
    say(f"grapevine node {settings.name} has stopped")
    return EXIT_OK


def _asked_to_stop(node: Node, stop: asyncio.Event) -> None:
    if stop.is_set():
        node.hurry()
    stop.set()


def _listen_for_hangup(loop: asyncio.AbstractEventLoop, node: Node, stop: asyncio.Event) -> None:
    """SIGHUP: a service reads its files again, a node whose terminal is gone stops, and `nohup` is respected."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return
    if sys.stdin is not None and sys.stdin.isatty():
        loop.add_signal_handler(signal.SIGHUP, _asked_to_stop, node, stop)
    else:
        loop.add_signal_handler(signal.SIGHUP, node.reload)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
