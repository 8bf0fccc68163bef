"""Before a stream moves: the node that is to go on computes what is there so far, while the old one goes on.

The client's pause is the time in which nobody decodes. Most of it would be the prompt: pulling its KV blocks, and
computing those of the answer. So a request for one token more than there is runs at the new node first; its engine then
holds that KV, and when the old one stops there is little left. (Live migration in stages, as of virtual machines; for
LLM engines: Llumnix, OSDI 2024, which copies the blocks where we let the connector pull and the engine compute.)

Only whole blocks are kept by an engine. Where they are large, the right moment is just behind the end of one: it is
waited for, and computed in a second stage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from node.plan import Plan, RouteOptions
from node.relay.attempts import Attempts
from node.relay.call import Call, Opened
from node.relay.upstream import UpstreamError
from node.view import ClusterView

#: Longest time of one stage (nobody waits for it), and that a place for it is waited for, seconds.
STAGE_S = 10.0
PLACE_S = 0.5
#: Blocks of at most so many tokens are never waited for: computing one takes no longer than an exchange.
FINE_TOKENS = 32
#: Stages before one move.
MAX_STAGES = 2
#: Moves that one entry prepares at a time: those that have moved decode between the prompts of those that have not.
MAX_MOVES = 2
#: Longest time that the end of a block is waited for, and between two looks, seconds.
ALIGN_S = 4.0
LOOK_S = 0.01
#: Longest answer of one token that is read, bytes.
MAX_ANSWER = 1024 * 1024
#: Ends the request id: the work of another request than the client's, for logs and journals.
SUFFIX = ".ahead"
_MAX_RID = 128

_log = logging.getLogger("grapevine.carry")

Open = Callable[[Attempts], Awaitable[tuple[Opened, Callable[[bool], None]]]]


@dataclass(slots=True)
class Stage:
    """What one stage came to: where, the size of a block there (0 = not known), and the tokens it was made with."""

    target: str = ""
    block: int = 0
    tokens: int = 0

    def tail(self, tokens: int) -> int:
        """How many of so many tokens its engine would have to compute."""
        return tokens - (self.tokens // self.block * self.block if self.block else self.tokens)

    @property
    def next_end(self) -> int:
        """Tokens at the end of the block that is not whole yet."""
        return (self.tokens // self.block + 1) * self.block


async def compute(
    open_attempt: Open,
    call: Call,
    options: RouteOptions,
    body: Callable[[Plan, ClusterView], bytes],
    clock: Callable[[], float],
) -> Stage:
    """Let some node compute the prompt of a continuation (`call`); an empty stage where that failed.

    :raises Refused: nobody has a place for it.
    """
    stage = Stage()
    sent = replace(call, rid=call.rid[: _MAX_RID - len(SUFFIX)] + SUFFIX, options=options)

    def fit(plan: Plan, view: ClusterView) -> Call:
        candidate = view.get(plan.target)
        info = candidate.models.get(plan.model) if candidate is not None else None
        stage.block = info.block_size if info is not None else 0
        return replace(sent, parsed=replace(sent.parsed, body=body(plan, view)))

    attempt = Attempts(sent, avoided=options.visited)
    attempt.fit = fit
    attempt.until = clock() + PLACE_S
    attempt.stood = True
    try:
        async with asyncio.timeout(STAGE_S):
            opened, finish = await open_attempt(attempt)
            whole = False
            try:
                if opened.upstream.status == 200:
                    await opened.upstream.read_all(MAX_ANSWER)
                    whole, stage.target = True, opened.plan.target
            finally:
                opened.end(whole)
                finish(whole)
    except (UpstreamError, TimeoutError) as error:
        _log.info("nothing was computed ahead of a move: %s", error or "it took too long")
        stage.target = ""
    return stage


async def until(reached: Callable[[], bool], limit_s: float) -> bool:
    """Wait until something is so; False when ``limit_s`` seconds passed first."""
    try:
        async with asyncio.timeout(limit_s):
            while not reached():  # noqa: ASYNC110 - tokens come by the dozen a second, and nobody tells of each
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return False
    return True


class Move:
    """The preparations of one stream's moves, one after the other. `turns`: `MAX_MOVES`, of all streams of an entry."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._task: asyncio.Task[None] | None = None

    def begin(self, prepare: Callable[[], Awaitable[bool]], go: Callable[[], None]) -> None:
        """Prepare, then go where that says so; asked again meanwhile, nothing changes."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run(prepare, go))
            self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """There is nothing to move any more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _run(self, prepare: Callable[[], Awaitable[bool]], go: Callable[[], None]) -> None:
        async with self._turns:
            if await prepare():
                go()

    def _done(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a move could not be prepared", exc_info=error)
