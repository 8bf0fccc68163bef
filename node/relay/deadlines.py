"""How long each wait on an engine or a peer may last. There is no total: a long stream is never cut by us."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds; each field bounds one kind of wait."""

    #: To open a connection. A live peer answers within a few round trips; raise it on links over a second.
    connect_s: float = 3.0
    #: Least time granted until the first byte of a streamed answer, whatever the prediction says.
    first_byte_s: float = 120.0
    #: Times the predicted time to first token that is granted; prefill on a CPU takes minutes and
    #: predictions are rough.
    first_byte_factor: float = 8.0
    #: Most that is ever granted for the first byte. An answer that is not streamed gets all of it: its
    #: first byte comes after its last token.
    first_byte_max_s: float = 1800.0
    #: Between two pieces of an answer, the client's slowness included.
    idle_s: float = 300.0
    #: For the whole of a small exchange between nodes (probe, drain, pull hint).
    exchange_s: float = 5.0

    def first_byte(self, *, stream: bool, predicted_ms: float) -> float:
        """Seconds to wait for the first byte of an answer predicted to begin after ``predicted_ms``."""
        if not stream:
            return self.first_byte_max_s
        wanted = self.first_byte_factor * predicted_ms / 1000.0
        return min(max(self.first_byte_s, wanted), self.first_byte_max_s)
