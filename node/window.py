"""Statistics over a bounded past: quantiles of the last values, and a rate that forgets."""

from __future__ import annotations

from collections import deque


class Window:
    """The last `size` values and their quantiles, sorted only when asked and only after a change."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._sorted: list[float] | None = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Take one value in; the oldest goes when there are `size`."""
        self._values.append(value)
        self._sorted = None

    def quantile(self, share: float) -> float:
        """The smallest value that at least `share` of the values do not exceed; 0 without values."""
        if self._sorted is None:
            self._sorted = sorted(self._values)
        if not self._sorted:
            return 0.0
        rank = -(-len(self._sorted) * share // 1)  # ceil
        return self._sorted[max(0, int(rank) - 1)]


class Rate:
    """Amount per second, as a quotient of two sums that fade.

    Every `add` fades the past by `keep`. Sums instead of a mean of quotients: a large prefill tells more about
    the rate than a small one, and weighs more.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Take in that `amount` took `seconds`; what took no time or moved nothing says nothing."""
        if amount <= 0 or seconds <= 0:
            return
        self._amount = self._amount * self._keep + amount
        self._seconds = self._seconds * self._keep + seconds

    @property
    def per_second(self) -> float:
        """The rate; 0 = nothing measured."""
        return self._amount / self._seconds if self._seconds > 0 else 0.0
