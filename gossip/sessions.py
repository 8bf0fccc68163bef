"""Outgoing streams: what each was opened for. One request frame, one reply frame, a deadline."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gossip.actions import OpenStream
from gossip.envelope import Token
from gossip.hub import Hub
from gossip.identity import Address
from gossip.messages import Part
from gossip.timers import Timer

#: Seconds beyond the session timeout after which we stop waiting for the shell's word.
SHELL_GRACE_S = 1.0


class Purpose(enum.Enum):
    """What a stream is for; `Session.key` is an address, a probe's seq, or an owner's name."""

    EXCHANGE = "exchange"
    PROBE = "probe"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Session:
    """An open outgoing stream."""

    purpose: Purpose
    key: Address | int | str
    to: Address
    #: Ties the reply to the request where the cluster has a key.
    token: Token | None


class Sessions:
    """All outgoing streams of one endpoint, at most `max_sessions`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._open: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def room(self) -> int:
        """How many more streams may be opened by exchanges: half is kept for probes and pulls."""
        busy = sum(1 for s in self._open.values() if s.purpose is Purpose.EXCHANGE)
        return max(0, min(self._hub.config.max_sessions // 2 - busy, self._hub.config.max_sessions - len(self)))

    def count(self, purpose: Purpose) -> int:
        """How many streams of a kind are open."""
        return sum(1 for s in self._open.values() if s.purpose is purpose)

    def open(
        self, purpose: Purpose, to: Address, parts: tuple[Part, ...], key: Address | int | str, now: float
    ) -> bool:
        """Open a stream if there is room; says whether it did."""
        config = self._hub.config
        full = self.room() == 0 if purpose is Purpose.EXCHANGE else len(self._open) >= config.max_sessions
        if full:
            self._hub.counters["sessions_refused"] += 1
            return False
        session = self._hub.next_seq()
        frame, token = self._hub.envelope.seal_request(self._hub.frame(parts))
        self._open[session] = Session(purpose, key, to, token)
        self._hub.timers.set((Timer.SESSION, session), now + config.session_timeout_s + SHELL_GRACE_S)
        self._hub.emit(OpenStream(session, to, frame, config.session_timeout_s))
        return True

    def close(self, session: int) -> Session | None:
        """End a stream; None if it was not open (any more)."""
        self._hub.timers.cancel((Timer.SESSION, session))
        return self._open.pop(session, None)
