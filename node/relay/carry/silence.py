"""When is silence in a stream the end of it? The rules, without a clock; `sentry.py` asks.

Slow is not dead. A stream may be silent because its engine computes somebody's long prompt, because it was preempted,
or because the host is starved; and because the engine hangs.

Rules for the own engine (`judge_engine`)
1. Less than `patience`: nothing is wrong. It is learnt: several times the gap between tokens that streams here have,
   within `PATIENCE_MIN_S` and `PATIENCE_MAX_S`.
2. Another stream heard from the engine since: it works, and ours waits for its turn; up to `TURN_MAX_S`.
3. The engine's processes are stopped: it hangs, however slow it was, and `STOPPED_S` is enough. (That they use no
   processor time says nothing: they may wait for a long step of a device.)
4. They work, or nobody can see it: as long as prompts are owed, `PREFILL_FACTOR` times the time that these should take,
   and where they are seen to work never less than `BUSY_FACTOR` times the patience; never more than `WORK_MAX_S`.
   This holds only between tokens. Before the first one the engine may rightly be silent for as long as others run.

Rules for a peer (`judge_peer`): its node says all the time that it lives, while it has nothing else to say. Without a
word for `NODE_S` it is lost. While its load rows still come, its loop turns and it is the connection that is in doubt:
TCP, which may be waiting to send something again, has until `LINK_S`.

docs/http.md adds up what a hang costs a client.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds.
PATIENCE_MIN_S = 2.0
PATIENCE_MAX_S = 10.0
#: Times the 95th percentile of a stream's mean gap between tokens.
PATIENCE_FACTOR = 10.0
TURN_MAX_S = 120.0
PREFILL_FACTOR = 3.0
BUSY_FACTOR = 5.0
WORK_MAX_S = 120.0
STOPPED_S = 1.0
NODE_S = 2.0
LINK_S = 3.0
#: A load row younger than this shows that a node's loop turns.
ROW_FRESH_S = 1.5


@dataclass(frozen=True, slots=True)
class EngineSigns:
    """What is known of the own engine while one of its streams is silent."""

    #: Seconds since this stream's last piece, and since the last piece of any other or a report of its connector.
    silent_s: float
    others_s: float
    #: Mean gap between tokens, 95th percentile of the last requests, seconds; 0 = not measured.
    gap_s: float
    #: Seconds that the prompts which are owed should take.
    owed_s: float
    #: Whether its processes work; False: one is stopped. None = cannot be seen.
    working: bool | None
    #: It has shown a first token, and the next one is due. Before, and where nothing is streamed, silence is no news.
    streaming: bool = True


def patience(gap_s: float) -> float:
    """Seconds of silence that mean nothing."""
    return min(max(PATIENCE_MIN_S, PATIENCE_FACTOR * gap_s), PATIENCE_MAX_S)


def judge_engine(signs: EngineSigns) -> str:
    """Why the engine is taken to hang, empty while it is not."""
    # Stopped processes are no question of speed.
    limit = STOPPED_S if signs.working is False else patience(signs.gap_s)
    if signs.silent_s < limit:
        return ""
    if signs.others_s < limit and signs.silent_s < TURN_MAX_S:
        return ""
    if signs.working is False:
        return f"the engine has said nothing for {signs.silent_s:.1f} s and is stopped"
    if not signs.streaming:
        return ""
    longer = BUSY_FACTOR * limit if signs.working else limit
    longer = min(max(longer, limit + PREFILL_FACTOR * signs.owed_s), WORK_MAX_S)
    return "" if signs.silent_s < longer else f"the engine has said nothing for {signs.silent_s:.1f} s"


def judge_peer(silent_s: float, row_age_s: float) -> str:
    """Why a peer is taken to be lost, empty while it is not."""
    limit = NODE_S if row_age_s > ROW_FRESH_S else LINK_S
    return "" if silent_s < limit else f"nothing came from it for {silent_s:.1f} s"
