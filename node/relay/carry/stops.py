"""Stop strings over a seam: what of an answer's text may be shown yet, and where a stop string ends it.

The rules are vLLM's (`vllm/v1/engine/detokenizer.py`), written anew: as many characters as the longest stop string has,
less one, are held back until more text shows that they begin none; of several strings the one that is complete first
wins, then the first of the list; tokens up to `min_tokens` complete none. With `include` the stop string is shown and
nothing is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """What may be shown now; `stop` is the string that ended the answer."""

    text: str
    stop: str | None = None


class StopStrings:
    """The end of one answer's text. `held`: text that exists and was not shown; `before`: what was shown last."""

    def __init__(self, stops: Sequence[str], *, include: bool, held: str = "", before: str = "") -> None:
        self._stops = stops
        self._include = include
        longest = max(map(len, stops), default=1) - 1
        self._hold = 0 if include else longest
        self._longest = longest
        # Shown text that a match may still begin in, then the text that was not shown.
        self._tail = before[len(before) - min(len(before), longest) :] + held
        self._shown = len(self._tail) - len(held)

    def add(self, text: str, *, may_stop: bool = True, last: bool = False) -> Shown:
        """More text of the answer came; `last`: it ends with it. `may_stop` False: it is too short to stop."""
        old = len(self._tail)
        self._tail += text
        found = self._first(old) if may_stop and text else None
        if found is not None:
            at, stop = found
            return Shown(self._tail[self._shown : at + len(stop) if self._include else max(at, self._shown)], stop)
        end = len(self._tail) if last else max(self._shown, len(self._tail) - self._hold)
        shown = self._tail[self._shown : end]
        cut = max(0, end - self._longest)
        self._tail, self._shown = self._tail[cut:], end - cut
        return Shown(shown)

    def _first(self, old: int) -> tuple[int, str] | None:
        """The stop string that is complete first among those that end behind `old` characters."""
        found = [
            (at + len(stop), index, at)
            for index, stop in enumerate(self._stops)
            if (at := self._tail.find(stop, max(0, old + 1 - len(stop)))) >= 0
        ]
        if not found:
            return None
        _, index, at = min(found)
        return at, self._stops[index]


def stop_strings(value: object) -> tuple[str, ...]:
    """The stop strings of a request's field, as the engine reads it."""
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(stop for stop in value if isinstance(stop, str) and stop) if isinstance(value, list) else ()
