"""The waiting room of a node: requests of its own clients that no node of the cluster had a place for.

Rules:
1. Bounded by `WaitingRoom.limit`, one line for each kind of request (model, forced target). Who is next in a line says
   `node.line`, how long a line may be `node.forecast`, and when a refused client should come back `node.bookings`.
2. A turn is a chance, not a promise: whoever has it decides anew on fresh load (late binding), and either leaves with a
   place or gives way to the next. Of each line one request at a time has the turn.
3. No wake-up is lost: what changes while somebody has the turn is remembered, and a turn that is not used (its request
   was cancelled, or timed out) goes on to the next.
4. Whoever is let in is told at once when it must go again (`Ticket.denial`): that happens only in favour of somebody
   more important, or of a client with fewer requests, in a full room.
5. A client that had less than the others lately is let into a line that is too long for them, and before them, as long
   as no more than `MAX_MODEST` such requests wait: fairness in who is let in, beside fairness in who is next. (What
   FQ-CoDel, RFC 8290, does with the packets of new flows.)
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable

from node.bookings import Bookings
from node.forecast import FEW, MAX_WAIT_S, Forecast
from node.line import Line, gives_way
from node.turns import Denial, Entrance, Queue, Ticket

#: Lines whose past is remembered while nobody waits in them.
MAX_LINES = 256
#: Lines that `snapshot` shows.
SHOWN_LINES = 16
#: Requests of modest clients that wait beyond what a line may be long.
MAX_MODEST = 4
#: Changes of the cluster's state within this time, in seconds, give one turn together: rows come by the hundred.
STIR_S = 0.02


class WaitingRoom:
    """All lines of a node."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._queues: dict[str, Queue] = {}
        self._past: OrderedDict[str, tuple[Forecast, Bookings]] = OrderedDict()
        self._count = 0
        self._stirring: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._count

    def waiting(self, line: str) -> bool:
        """Say whether somebody stands in this line."""
        return line in self._queues

    # --- coming and going

    def join(self, entrance: Entrance) -> Ticket | Denial:
        """Stand in line, or be denied. The caller must `Ticket.leave` in the end."""
        now = self._clock()
        forecast, bookings = self._known(entrance.line)
        queue = self._queues.get(entrance.line) or Queue(now)
        modest = False
        if not entrance.first and not bookings.take(entrance.client, entrance.mark, now):
            why = self._too_long(entrance, queue.line, now)
            modest = why is not None and self._is_modest(entrance, queue, now)
            if why is not None and not modest:
                return Denial(why, self._after(entrance, now))
        if self._count >= self.limit and not self._make_room(entrance, queue, now):
            return Denial("The queue of this node is full.", self._after(entrance, now))
        if entrance.line not in self._queues:  # nobody waits there, or the last one had to go for our sake
            queue = self._queues[entrance.line] = Queue(now)
            forecast.opened(now, entrance.usual_s, owed=len(bookings))
        ticket = Ticket(self, entrance, now)
        ticket.modest = modest
        queue.modest += modest
        queue.line.add(ticket, first=entrance.first or modest)
        forecast.joined()
        self._count += 1
        return ticket

    def deny(self, ticket: Ticket, why: str) -> Denial:
        """Say when one that waited in vain should come back."""
        entrance = Entrance(ticket.line, ticket.client, ticket.mark, ticket.priority)
        return Denial(why, self._after(entrance, self._clock()))

    def quit(self, ticket: Ticket, *, served: bool) -> None:
        """Called by `Ticket` only."""
        queue = self._queues.get(ticket.line)
        if queue is None or ticket not in queue.line:
            return
        now = self._clock()
        forecast, _ = self._known(ticket.line)
        queue.line.remove(ticket, served=served)
        queue.modest -= ticket.modest
        self._count -= 1
        if served:
            forecast.served(ticket.client, now, waited_s=now - ticket.joined_at, usual_s=ticket.usual_s)
        if not queue.line:
            del self._queues[ticket.line]
            forecast.emptied(now, ticket.usual_s)
        elif queue.turn is ticket:
            queue.turn = None
            queue.offer(now)  # also when it was served: where there was one place there may be another

    # --- turns

    def stir(self) -> None:
        """A place became free: give one of each line its turn."""
        now = self._clock()
        for queue in self._queues.values():
            queue.offer(now)

    def stir_soon(self) -> None:
        """What is known of the cluster changed."""
        if self._queues and self._stirring is None:
            self._stirring = asyncio.get_running_loop().call_later(STIR_S, self._stir_now)

    def retry(self, line: str) -> None:
        """Nothing has happened for a while, as far as this request of the line can tell."""
        queue = self._queues.get(line)
        if queue is not None:
            queue.retry(self._clock())

    def give_way(self, ticket: Ticket) -> None:
        """Called by `Ticket` only."""
        queue = self._queues.get(ticket.line)
        if queue is not None and queue.turn is ticket:
            queue.give_way(ticket, self._clock())

    def _stir_now(self) -> None:
        self._stirring = None
        self.stir()

    # --- what is seen and said

    def snapshot(self) -> dict[str, object]:
        """How long the lines are and how fast they move; JSON-able, bounded."""
        now = self._clock()
        shown = sorted(self._queues, key=lambda name: -len(self._queues[name].line))[:SHOWN_LINES]
        return {"waiting": self._count, "limit": self.limit, "lines": [self._shown(name, now) for name in shown]}

    def validate(self) -> None:
        """Check the invariants; raises AssertionError with the broken one."""
        assert self._count == sum(len(queue.line) for queue in self._queues.values()), "the room's count is wrong"
        assert self._count <= self.limit, "more wait than there is room for"
        assert len(self._past) <= MAX_LINES + len(self._queues), "too much is remembered"
        for queue in self._queues.values():
            queue.line.validate()
            assert len(queue.line), "an empty line was kept"
            assert queue.turn is None or queue.turn in queue.line, "somebody who left has the turn"
        for _, bookings in self._past.values():
            bookings.validate()

    def _shown(self, name: str, now: float) -> dict[str, object]:
        line = self._queues[name].line
        forecast, bookings = self._known(name)
        waiters = list(line.waiters())
        model, _, target = name.partition("\0")
        return {
            "model": model[:128],
            "target": target or None,
            "waiting": len(waiters),
            "clients": line.clients(),
            "oldest_s": round(max(now - ticket.joined_at for ticket in waiters), 3),
            "places_per_s": round(forecast.rate(now, 0.0), 3) if forecast.measured() else None,
            "overloaded": forecast.standing(now, waiters[0].usual_s),
            "booked": len(bookings),
        }

    # --- in detail

    def _known(self, line: str) -> tuple[Forecast, Bookings]:
        past = self._past.get(line)
        if past is None:
            past = self._past[line] = (Forecast(), Bookings())
        self._past.move_to_end(line)
        if len(self._past) > MAX_LINES:
            quiet = (name for name in self._past if name not in self._queues and name != line)
            for name in list(quiet)[: len(self._past) - MAX_LINES]:
                del self._past[name]
        return past

    def _too_long(self, entrance: Entrance, line: Line[Ticket], now: float) -> str | None:
        """Why the line is too long for this request, None when it is not."""
        forecast, bookings = self._known(entrance.line)
        rate = forecast.rate(now, entrance.guess_per_s)
        longest_s = entrance.patience_s
        if longest_s is not None and not forecast.measured():
            return None  # a guess is no reason to refuse a client that has said how long it would wait
        if longest_s is None:
            longest_s = forecast.longest_s(now, entrance.usual_s)
            # Those who are late may never come: a place is not left empty for them.
            coming = bookings.soon(now, FEW / rate, late=False)
            if line.ahead(entrance.client, entrance.priority, coming) < FEW:
                return None
        booked = bookings.soon(now, min(longest_s, MAX_WAIT_S))
        expected_s = (line.ahead(entrance.client, entrance.priority, booked) + 1) / rate
        if expected_s <= longest_s:
            return None
        return (
            f"Its turn would come in about {_seconds(expected_s)}, and it would wait for {_seconds(longest_s)} at most."
        )

    def _is_modest(self, entrance: Entrance, queue: Queue, now: float) -> bool:
        if queue.modest >= MAX_MODEST or entrance.patience_s is not None:
            return False
        forecast, _ = self._known(entrance.line)
        return forecast.modest(entrance.client, queue.line.count(entrance.client, entrance.priority), now)

    def _after(self, entrance: Entrance, now: float) -> int:
        forecast, bookings = self._known(entrance.line)
        queue = self._queues.get(entrance.line)
        ahead = len(queue.line) if queue is not None else 0
        rate = forecast.rate(now, entrance.guess_per_s)
        return bookings.book(entrance.client, entrance.mark, now, priority=entrance.priority, rate=rate, ahead=ahead)

    def _make_room(self, entrance: Entrance, queue: Queue, now: float) -> bool:
        """Send somebody less important away; False when there is nobody."""
        found = [least for each in self._queues.values() if (least := each.line.least()) is not None]
        if not found:
            return False
        least = max(found, key=lambda item: (item[0].priority, item[1]))
        own = queue.line.count(entrance.client, entrance.priority)
        if not entrance.first and not gives_way(least, entrance.client, entrance.priority, own):
            return False
        victim = least[0]
        victim.denial = self.deny(victim, "Its place in the queue was needed for another request.")
        victim.leave()
        victim.woken.set()
        return True


def _seconds(value: float) -> str:
    return f"{math.ceil(value)} s" if value >= 10 else f"{value:.1f} s"
