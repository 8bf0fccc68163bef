"""Sends what the scheduler half sees to the node, and keeps its mirror of the pool up to date."""

import logging
import math
from collections.abc import Callable, Sequence

from kvmigrate.connector.mirror import PoolMirror
from kvmigrate.link import (
    Add,
    Clear,
    Disconnected,
    Drop,
    Filled,
    Finished,
    LinkClient,
    Load,
    Message,
    Pool,
    Prefilled,
    Pulled,
    Started,
)

logger = logging.getLogger("vllm.grapevine")

LOAD_INTERVAL_S = 0.1
"""Load reports at most this often; the node gossips a row every 200 ms. That nothing runs any more is told at once."""
SAME_LOAD_INTERVAL_S = 1.0
"""A load like the one told before is told this often: a sign of life. Each report wakes the node, beside a step."""
SAME_KV_USE = 0.01
"""Shares of the KV cache that differ by less are the same."""


class LinkReports:
    """Implements `scheduler.Reports` over the link. A report that the link refuses is lost: reports are hints."""

    def __init__(self, link: LinkClient, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._told = (0, 0, 0.0)
        self._told_at = -math.inf

    def started(self, rid: str, prompt_tokens: int, local_tokens: int, external_tokens: int) -> None:
        """Report that a request was scheduled, and what it found cached (tokens)."""
        self._link.send(Started(rid, prompt_tokens, local_tokens, external_tokens))

    def prefilled(self, rid: str, seconds: float) -> None:
        """Report that a prompt is computed."""
        self._link.send(Prefilled(rid, seconds))

    def filled(self, rid: str, hashes: Sequence[bytes], tokens: int) -> None:
        """Report the full blocks of a request from block 0."""
        self._link.send(Filled(rid, tuple(bytes(block_hash) for block_hash in hashes), tokens))

    def finished(self, rid: str) -> None:
        """Report that a request left the engine."""
        self._link.send(Finished(rid))

    def load(self, running: int, waiting: int, kv_use: float) -> None:
        """Report the engine's load when it is another one, and at times when it is not."""
        now, (ran, waited, used) = self._clock(), self._told
        same = (running, waiting) == (ran, waited) and abs(kv_use - used) < SAME_KV_USE
        interval_s = SAME_LOAD_INTERVAL_S if same else LOAD_INTERVAL_S if running else 0.0
        if now - self._told_at >= interval_s:
            self._told, self._told_at = (running, waiting, kv_use), now
            self._link.send(Load(running, waiting, kv_use))


class PoolFeed:
    """Applies the node's messages to the mirror.

    `on_saved` hears of new blocks, `on_lost` of a dropped pool, `on_pulled` of a request whose pull is over.
    """

    def __init__(
        self,
        link: LinkClient,
        mirror: PoolMirror,
        *,
        on_saved: Callable[[list[bytes]], None],
        on_lost: Callable[[], None],
        on_pulled: Callable[[str], None] = lambda rid: None,
    ) -> None:
        self._link = link
        self._mirror = mirror
        self._on_saved = on_saved
        self._on_lost = on_lost
        self._on_pulled = on_pulled

    def poll(self) -> None:
        """Take what the node has sent; returns at once."""
        for message in self._link.poll():
            self._handle(message)

    def _handle(self, message: Message | Disconnected) -> None:
        match message:
            case Add():
                self._mirror.add(message.items)
                self._on_saved([item.block_hash for item in message.items])
            case Drop():
                self._mirror.drop(message.hashes)
            case Pulled():
                self._on_pulled(message.rid)
            case Pool() | Clear():
                self._on_lost()
            case Disconnected():
                logger.warning("no link to the node (%s); serving without the KV pool until it is back", message.why)
                self._on_lost()
            case _:
                pass
