"""What this node sent where, as far as the receivers' load vectors cannot show it yet.

A vector that was true at time t (local clock) includes what was sent before t less the way there. What was sent
later counts as unseen until a newer vector comes or the request ends; requests that the vector still counts
and that ended since are unseen the other way round.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from node.view import Unseen

#: Requests remembered in all; the oldest are forgotten beyond.
MAX_SENDS = 8192

#: Seconds added to the way there: vectors are stamped when they are packed, a little after they were measured.
SLACK_S = 0.05


@dataclass(slots=True)
class _Send:
    target: str
    ms: float
    at: float
    #: The target's newest vector includes it.
    seen: bool = False


class OwnSends:
    """The ledger; every request is entered once and ended once."""

    def __init__(self, *, max_sends: int = MAX_SENDS) -> None:
        self.max_sends = max_sends
        self._sends: OrderedDict[str, _Send] = OrderedDict()
        self._open: dict[str, dict[str, _Send]] = {}
        self._unseen: dict[str, Unseen] = {}

    @property
    def unseen(self) -> dict[str, Unseen]:
        """Target -> what its vector does not show; shared, read only."""
        return self._unseen

    def sent(self, rid: str, target: str, ms: float, now: float) -> None:
        """A request whose prompt should take `ms` to compute goes to `target`; a bounced one is sent anew."""
        self._remove(rid)
        while len(self._sends) >= self.max_sends:
            self._remove(next(iter(self._sends)))
        send = _Send(target, max(0.0, ms), now)
        self._sends[rid] = send
        self._open.setdefault(target, {})[rid] = send
        old = self._unseen.get(target, _NOTHING)
        self._unseen[target] = Unseen(old.sent + 1, old.sent_ms + send.ms, old.finished)

    def ended(self, rid: str) -> None:
        """The request is over, or its target refused it."""
        send = self._remove(rid)
        if send is not None and send.seen:
            old = self._unseen.get(send.target, _NOTHING)
            self._unseen[send.target] = Unseen(old.sent, old.sent_ms, old.finished + 1)

    def vector(self, target: str, as_of: float, rtt_ms: float) -> None:
        """A newer vector of `target` came, true at `as_of` (local clock)."""
        before = as_of - rtt_ms / 2000 - SLACK_S
        sent, ms = 0, 0.0
        for send in self._open.get(target, {}).values():
            send.seen = send.at <= before
            if not send.seen:
                sent += 1
                ms += send.ms
        if sent:
            self._unseen[target] = Unseen(sent, ms)
        else:
            self._unseen.pop(target, None)

    def forget(self, target: str) -> None:
        """The target died: what it had is gone."""
        for rid in list(self._open.get(target, ())):
            self._remove(rid)
        self._unseen.pop(target, None)

    def validate(self) -> None:
        """Every invariant, for tests."""
        assert len(self._sends) <= self.max_sends
        assert sum(len(open_) for open_ in self._open.values()) == len(self._sends)
        for target, since in self._unseen.items():
            hidden = [send for send in self._open.get(target, {}).values() if not send.seen]
            assert since.sent == len(hidden)
            assert abs(since.sent_ms - sum(send.ms for send in hidden)) < 1e-3 * (1 + since.sent_ms)

    def _remove(self, rid: str) -> _Send | None:
        send = self._sends.pop(rid, None)
        if send is None:
            return None
        open_ = self._open[send.target]
        del open_[rid]
        if not open_:
            del self._open[send.target]
        if not send.seen:
            old = self._unseen[send.target]
            # Rounding leaves nothing behind: without a request there is nothing to compute.
            left = Unseen(old.sent - 1, max(0.0, old.sent_ms - send.ms) if old.sent > 1 else 0.0, old.finished)
            if left == _NOTHING:
                del self._unseen[send.target]
            else:
                self._unseen[send.target] = left
        return send


_NOTHING = Unseen()
