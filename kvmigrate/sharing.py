"""When another source is worth asking for blocks of one chain, and how long a pull takes with those that are. Pure.

A fluid: each source gives at its rate from when it can begin, and all work on whatever is left that they reach. That is
what the split comes to with runs that are small against the pull (`split`, rules 1 to 3). The same rule serves who
decides (`crew`) and who has to foresee it, because a pull is weighed against computing (routing).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

#: Another source is worth asking when the pull gets so much shorter: seconds, and share of the time without it.
WORTH_S: Final = 0.002
WORTH_SHARE: Final = 0.1


class Giver(NamedTuple):
    """A source: bytes per second, how many bytes of the front it could give, and after how many seconds the first."""

    rate: float
    reach: float
    begin_s: float = 0.0


_FRONT: Final = Giver(0.0, 0.0)


def takes_s(givers: Sequence[Giver]) -> float:
    """Seconds until all is here that the first could give. Nobody reaches further, and each begins before that."""
    whole, longest_s = givers[0].reach, 0.0
    for _, low, _ in (_FRONT, *givers):
        if low < whole:  # what lies behind, only those bring who reach beyond
            rate, left = 0.0, whole - low
            for gives, reach, begin_s in givers:
                if reach > low:
                    rate += gives
                    left += gives * begin_s
            if left > longest_s * rate:
                longest_s = left / rate
    return longest_s


def worth(without_s: float, with_s: float) -> bool:
    """Whether another source makes a pull so much shorter that it is asked."""
    return without_s - with_s >= max(WORTH_S, WORTH_SHARE * without_s)


def helpers(first: Giver, others: Iterable[Giver]) -> tuple[list[int], float]:
    """Return which of the others are worth asking, each beside those before it, and the seconds that all then take.

    Nobody reaches further than the first one.
    """
    asked, chosen = [first], []
    seconds = takes_s(asked)
    for number, giver in enumerate(others):
        asked.append(giver)
        with_s = takes_s(asked)
        if worth(seconds, with_s):
            chosen.append(number)
            seconds = with_s
        else:
            asked.pop()
    return chosen, seconds
