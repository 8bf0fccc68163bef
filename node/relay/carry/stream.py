"""An answer at its entry, carried over as many legs as it takes: the asyncio loop around `carrier.py`.

Rules
1. A client sees whole events only: of one that was cut nobody could say how it goes on.
2. The old leg is ended, which aborts its work, before the next one is opened: never two engines for one request.
3. Back-pressure is as in `node.relay.answer`: a piece is read only after the last one was taken.
4. What cannot be carried ends with an error event that says why. A request to move that cannot be followed changes
   nothing: the stream goes on where it is. So it does while the next node computes what is there so far (`ahead.py`).
5. An answer that is gathered (`gathering.py`) goes the same way, but what fails is a status and not an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from node.errors import RemoteError
from node.plan import Refusal, RouteOptions
from node.relay.answer import Watchdog, is_event_stream
from node.relay.answer import cut as cut_off
from node.relay.carry import marks
from node.relay.carry.ahead import Move
from node.relay.carry.carrier import Carrier, Leg
from node.relay.carry.continuation import CannotCarryError
from node.relay.carry.convert import DivergedError
from node.relay.carry.events import DONE, EventSplitter, cut
from node.relay.carry.gathering import Failure, Gathering, own_words
from node.relay.carry.lost import Lost
from node.relay.carry.record import EngineError
from node.relay.refused import Refused
from node.relay.response import RawResponse
from node.relay.upstream import (
    UpstreamBrokenError,
    UpstreamError,
    UpstreamMovedError,
    UpstreamSilentError,
    UpstreamStalledError,
)

#: While the next leg is looked for, the client hears a comment each so many seconds, so that nothing on the way to it
#: takes the connection for dead. Most pauses are shorter.
COMMENT_EVERY_S = 5.0
COMMENT = b": waiting for another node\n\n"

#: Whom it is written to.
Reader = RawResponse | Gathering

#: Longest message of what ends a stream.
MAX_MESSAGE = 2000

_log = logging.getLogger("grapevine.carry")


class LateError(Exception):
    """The client's deadline has passed."""

    def __init__(self) -> None:
        super().__init__("the time that its client gave it is over")


class CarriedStream:
    """Writes one answer to one client.

    `on_leg` hears of each leg that begins and returns what ends that; `on_lost` of each that was lost and closed;
    `on_carried` of each pause: seconds, and why it failed ("" when it did not). `may_move` says whether another node
    could take the stream; `moves` holds back those that are too many at a time.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        carrier: Carrier,
        *,
        idle_s: float,
        left_s: float | None,
        on_leg: Callable[[CarriedStream, Leg], Callable[[], None]],
        on_lost: Callable[[Leg, Lost], Awaitable[None]],
        on_carried: Callable[[Lost, float, str], None],
        may_move: Callable[[Carrier, str], bool],
        moves: asyncio.Semaphore,
    ) -> None:
        self._request = request
        self._carrier = carrier
        self._idle_s = idle_s
        #: Loop time at which the client's deadline passes.
        self._end = float("inf") if left_s is None else asyncio.get_running_loop().time() + left_s
        self._on_leg = on_leg
        self._on_lost = on_lost
        self._on_carried = on_carried
        self._may_move = may_move
        self._splitter = EventSplitter()
        self._leg: Leg | None = None
        self._lost: Lost | None = None
        self._finding: asyncio.Future[Leg | None] | None = None
        self._move = Move(moves)
        #: Why no other leg is to follow; empty while one may.
        self._ending = ""
        #: When the client was last told something, and when it was known that the leg is lost.
        self._told_at = self._known_at = time.monotonic()
        #: Monotonic time of the last piece of the present leg, or of the last leg.
        self.heard = 0.0
        self.error: str | None = None
        #: What was to be gathered was answered in one piece by another node: that is the answer.
        self.in_one_piece: Leg | None = None

    async def run(self, leg: Leg, response: Reader) -> None:
        """Relay everything from ``leg`` on. Every leg but `in_one_piece` is ended when this returns or raises.

        A client that goes away raises ConnectionError or CancelledError.
        """
        self._leg = leg
        try:
            await response.prepare(self._request)
            await self._legs(response)
        finally:
            self._end_leg(whole=False)

    def move(self) -> bool:
        """Go on elsewhere, as soon as can be; False when that is impossible now, and nothing changes."""
        leg = self._leg
        if leg is None or not self._can_move(leg):
            return False
        self._begin_move(leg, "it is to run elsewhere")
        return True

    @property
    def elsewhere(self) -> RouteOptions | None:
        """What its next leg would be decided by, were it moved now; None while it has no leg that could be left."""
        leg = self._leg
        return None if leg is None else self._carrier.elsewhere(leg.opened.plan.target)

    def end(self, why: str) -> None:
        """End it with an error event now, wherever it runs: nobody will be here to go on with it."""
        self._ending = why
        if self._leg is not None:
            self._leg.opened.upstream.fail(UpstreamBrokenError(why))
        if self._finding is not None:
            self._finding.cancel()

    @property
    def movable(self) -> bool:
        """Whether the request, as far as it has come, could be carried."""
        return not self._carrier.why_not()

    # --- legs

    async def _legs(self, response: Reader) -> None:
        while (leg := self._leg) is not None:
            lost = await self._one_leg(leg, response)
            if lost is None:
                return
            self._end_leg(whole=False)
            if self._lost is None:  # else the client still waits since an earlier one
                self._known_at = time.monotonic()
            if self._ending:
                await self._end_broken(response, lost, self._ending)
                return
            await self._on_lost(leg, lost)
            try:
                self._leg = await self._next_leg(lost, response)
            except LateError as error:
                await self._end_late(response, error)
                return
            except (CannotCarryError, Refused) as error:
                refusal = error.refusal if isinstance(error, Refused) else None
                why = str(error) if refusal is None else refusal.message
                self._on_carried(lost, time.monotonic() - self._told_at, why)
                _log.warning("a stream broke off on %s (%s) and cannot go on: %s", lost.target, lost.why, why)
                await self._end_broken(response, lost, why, refusal)
                return
            self._lost, self._splitter = lost, EventSplitter()
            if self._leg is None:
                await self._write_end(response, self._carrier.ending())
            elif isinstance(response, Gathering) and not is_event_stream(self._leg.opened.upstream.headers):
                self._was_told()
                self.in_one_piece, self._leg = self._leg, None

    async def _one_leg(self, leg: Leg, response: Reader) -> Lost | None:
        """Relay one leg; how it was lost, None when the answer is whole."""
        leave = self._on_leg(self, leg)
        try:
            await self._copy(leg, response)
        except EngineError as error:
            if error.code == marks.LATE:  # its clock was a moment ahead of ours
                await self._end_late(response, LateError())
                return None
            cause = "stalled" if error.code == marks.STALLED else "engine"
            lost = Lost(
                leg.opened.plan.target,
                cause,
                str(error),
                told=True,
                event=b"" if error.code in marks.CODES else error.event,
            )
            if isinstance(response, Gathering) and (said := own_words(lost.event)) is not None and said[0] < 500:
                await self._end_broken(response, lost, "the request is at fault")
                return None
            return lost
        except DivergedError as error:
            self.error = str(error)
            await self._fail(response, f"The stream broke off: {error}.", marks.DIVERGED)
            return None
        except LateError as error:
            await self._end_late(response, error)
            return None
        except RemoteError as error:
            return Lost(leg.opened.plan.target, _cause(error), str(error))
        finally:
            leave()
        self._end_leg(whole=True)
        return None

    def _end_leg(self, *, whole: bool) -> None:
        leg, self._leg = self._leg, None
        self._move.cancel()
        if leg is not None:
            leg.end(whole)

    async def _next_leg(self, lost: Lost, response: Reader) -> Leg | None:
        """The next leg; the client hears a comment now and then."""
        finding = self._finding = asyncio.ensure_future(self._carrier.next_leg(lost))
        try:
            while not (await asyncio.wait({finding}, timeout=min(COMMENT_EVERY_S, self._left_s)))[0]:
                if self._left_s <= 0:
                    raise LateError
                await self._write(response, COMMENT)
        except BaseException:
            await _abandon(finding)
            raise
        finally:
            self._finding = None
        if self._ending:
            await _abandon(finding)
            raise CannotCarryError(self._ending)
        return finding.result()

    # --- one leg

    async def _copy(self, leg: Leg, response: Reader) -> None:
        upstream, translator = leg.opened.upstream, leg.translator
        writing = False
        try:
            async with asyncio.timeout(self._idle_s) as timer:
                watchdog = Watchdog(timer, self._idle_s, self._end)
                piece = leg.opened.first
                while piece:
                    watchdog.moved()
                    self.heard = time.monotonic()
                    leg.opened.on_piece(piece)
                    told, fault = self._take(leg, piece)
                    if told:
                        writing = True
                        await response.write(told)
                        writing = False
                        self._was_told()
                    if fault is not None:
                        raise fault
                    if translator.done and translator is not self._carrier.record:
                        break  # the rest of its bytes is of no use
                    piece = await self._read(leg)
                if not translator.done and (self._carrier.record.shows_ids or not self._carrier.record.blind):
                    raise UpstreamBrokenError("the stream ended before its end")
                writing = True
                await response.write_eof()  # waits for the client like any other write
        except TimeoutError as error:
            if writing:
                raise ConnectionResetError("the client took nothing for too long") from error
            upstream.close()
            if self._left_s <= 0:
                raise LateError from error
            raise UpstreamSilentError("nothing came for too long") from error

    async def _read(self, leg: Leg) -> bytes:
        try:
            return await leg.opened.upstream.read()
        except UpstreamError:
            if leg.translator.done:
                return b""  # it has said everything
            raise

    def _take(self, leg: Leg, piece: bytes) -> tuple[bytes, RemoteError | None]:
        """What the client sees of a piece, and what ended the leg within it."""
        told: list[bytes] = []
        move = False
        try:
            run, record = self._splitter.run(piece), self._carrier.record
            if run is not None and leg.translator is record:
                run = record.take_usual(run, told)
            for event in self._splitter.feed(piece) if run is None else cut(run):
                if event.startswith(b": grapevine-"):
                    move = move or event == marks.MOVE
                elif not leg.translator.done:  # behind the end is nothing for a client
                    told.append(leg.translator.take(event))
        except RemoteError as error:
            return b"".join(told), None if leg.translator.done else error
        if move and not leg.translator.done and self._can_move(leg):
            self._begin_move(leg, "its node wants to be rid of it")
        return b"".join(told), None

    def _begin_move(self, leg: Leg, why: str) -> None:
        def go() -> None:
            if leg is self._leg and not leg.translator.done and self._can_move(leg):
                leg.opened.upstream.fail(UpstreamMovedError(why))

        self._move.begin(lambda: self._carrier.prepare(leg.opened.plan.target), go)

    def _can_move(self, leg: Leg) -> bool:
        return self.movable and self._may_move(self._carrier, leg.opened.plan.target)

    def _was_told(self) -> None:
        """The client has something new: a pause, if there was one, is over."""
        lost, self._lost = self._lost, None
        now = time.monotonic()
        if lost is not None and self._leg is not None:
            pause_s = now - self._told_at
            self._on_carried(lost, pause_s, "")
            _log.info(
                "carried a stream from %s to %s: %s; known after %.2f s, %.2f s for a tokenizer, a pause of %.2f s",
                lost.target,
                self._leg.opened.plan.target,
                lost.why,
                self._known_at - self._told_at,
                self._carrier.asking_s,
                pause_s,
            )
        self._told_at = now

    # --- the end

    async def _write(self, response: Reader, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._idle_s):
                await response.write(data)
        except TimeoutError as error:
            raise ConnectionResetError("the client took nothing for too long") from error

    async def _write_end(self, response: Reader, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._idle_s):
                await response.write(data)
                await response.write_eof()
        except TimeoutError:
            cut_off(self._request)

    @property
    def _left_s(self) -> float:
        """Seconds that the client still gives it."""
        return max(0.0, self._end - asyncio.get_running_loop().time())

    async def _end_late(self, response: Reader, error: LateError) -> None:
        self.error = str(error)
        await self._fail(response, f"The stream broke off: {error}.", marks.LATE)

    async def _end_broken(self, response: Reader, lost: Lost, why: str, refusal: Refusal | None = None) -> None:
        self.error = lost.why
        what = "answer" if isinstance(response, Gathering) else "stream"
        message = f"The {what} broke off: {lost.why}. It cannot go on elsewhere: {why}."[:MAX_MESSAGE]
        if isinstance(response, Gathering):
            said = own_words(lost.event) if refusal is None else None
            response.failure = Failure(refusal or _unanswered(message), said)
        elif lost.event and not self._carrier.record.shows_ids:  # not vLLM: its own words are all we know
            await self._write_end(response, lost.event + DONE)
        else:
            await self._fail(response, message, marks.BROKE)

    async def _fail(self, response: Reader, message: str, code: str) -> None:
        if isinstance(response, Gathering):
            response.failure = Failure(_unanswered(message), late=code == marks.LATE)
        else:
            await self._write_end(response, marks.error_event(message, code))


def _unanswered(message: str) -> Refusal:
    return Refusal(503, "no_node_answered", message, type="server_error")


def _cause(error: RemoteError) -> str:
    match error:
        case UpstreamMovedError():
            return "moved"
        case UpstreamStalledError():
            return "stalled"
        case UpstreamSilentError():
            return "silent"
        case UpstreamBrokenError():
            return "broken"
    return "garbage"


async def _abandon(finding: asyncio.Future[Leg | None]) -> None:
    """End a search that nobody waits for any more, and what it may have found."""
    finding.cancel()
    (found,) = await asyncio.gather(finding, return_exceptions=True)
    if isinstance(found, Leg):
        found.end(False)
