"""Who is asked for blocks of one prompt besides the source that the plan names. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Sources of one pull besides the plan's.
MORE_SOURCES = 2


def further(
    held: Mapping[str, int],
    *,
    target: str,
    source: str,
    reach: int,
    rate: Callable[[str], float],
    tie: Callable[[str], Any],
    most: int = MORE_SOURCES,
) -> dict[str, int]:
    """Return those that could give most beside `source`, and how much each is asked for: up to where `source` is.

    `held`: who holds how much of the prompt, in chunks or tokens, the target itself included, in blocks that fit it;
    `reach`: how much `source` is asked for. What lies beyond is not: the plan has weighed it, and found that computing
    it is better. `rate`: bytes per second from there to the target; `tie` orders those that are as good.
    """
    own = held.get(target, 0)
    able = {name: min(has, reach) for name, has in held.items() if has > own and name not in (target, source)}
    names = sorted(able, key=lambda name: (-rate(name) * (able[name] - own), tie(name)))
    return {name: able[name] for name in names[:most]}
