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
    chunks: int,
    rate: Callable[[str], float],
    tie: Callable[[str], Any],
) -> list[str]:
    """Return those that could give most beside `source`, which is asked for `chunks`: at most `MORE_SOURCES`.

    `held`: who holds how many chunks of the prompt, the target itself included, in blocks that fit it. `rate`: bytes
    per second from there to the target; `tie` orders those that are as good.
    """
    own = held.get(target, 0)
    able = [name for name, has in held.items() if has > own and name not in (target, source)]
    able.sort(key=lambda name: (-rate(name) * min(1.0, (held[name] - own) / max(1, chunks - own)), tie(name)))
    return able[:MORE_SOURCES]
