"""Which peers to leave alone for now, as this node alone knows it. Pure; ``now`` is monotonic seconds.

A peer that does not answer is avoided long before gossip calls it dead, and a peer that only stumbled is not.

Rules, for each peer:
1. Closed: requests go there. `CONFIRMED` failures in a row, no further than `WINDOW_S` apart, open the circuit. One
   failure never does, and any answer, a refusal for want of room included, ends the row.
2. Open: it is avoided for `OPEN_FIRST_S`, doubled with each opening up to `OPEN_MAX_S`. Failures of requests that were
   on their way when it opened change nothing; an answer to one of them ends the time at once.
3. Half-open: one request at a time may try. A failure opens the circuit again; `TRIALS` answers close it. A trial that
   ends without saying anything (its client went away) frees the way for another, and so does one that takes `TRIAL_S`.
4. A circuit that opens again within `MEMORY_S` after it closed goes on where it was: a peer that flaps is tried less
   and less often. A peer that came back under a new incarnation starts clean.

Nothing here counts requests or load, and avoided means tried last: where there is nobody better, a peer is asked
whatever its circuit says (`node.eligible`).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

CONFIRMED = 2
WINDOW_S = 30.0
OPEN_FIRST_S = 1.0
OPEN_MAX_S = 15.0
TRIALS = 2
TRIAL_S = 30.0
MEMORY_S = 60.0
#: Peers remembered; far above any cluster, only so that the table has a bound. The longest untouched go first.
MAX_CIRCUITS = 4096
#: Longest reason kept, characters.
MAX_REASON = 200


class CircuitState(enum.Enum):
    """What may be sent."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True)
class _Circuit:
    incarnation: int
    state: CircuitState = CircuitState.CLOSED
    #: In a row while closed; when the last one was.
    failures: int = 0
    failed_at: float = float("-inf")
    #: Openings without `MEMORY_S` of peace; until when the last one lasts, and when it closed again.
    openings: int = 0
    until: float = 0.0
    closed_at: float = float("-inf")
    answers: int = 0
    trial_since: float | None = None
    reason: str = ""


class Circuits:
    """All of them; peers without a failure have none."""

    def __init__(self) -> None:
        self._circuits: OrderedDict[str, _Circuit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._circuits)

    def __iter__(self) -> Iterator[str]:
        """Peers that have one."""
        return iter(self._circuits)

    # --- what happened

    def failed(self, name: str, incarnation: int, now: float, why: str = "") -> None:
        """A request could not begin there, or broke off."""
        circuit = self._circuits.get(name)
        if circuit is None or circuit.incarnation != incarnation:
            circuit = self._circuits[name] = _Circuit(incarnation)
        self._circuits.move_to_end(name)
        if len(self._circuits) > MAX_CIRCUITS:
            self._circuits.popitem(last=False)
        self._advance(circuit, now)
        if circuit.state is CircuitState.OPEN:
            return
        circuit.failures = circuit.failures + 1 if now - circuit.failed_at <= WINDOW_S else 1
        circuit.failed_at = now
        circuit.reason = why[:MAX_REASON]
        if circuit.state is CircuitState.HALF_OPEN or circuit.failures >= CONFIRMED:
            self._open(circuit, now)

    def worked(self, name: str, now: float) -> None:
        """It answered."""
        circuit = self._circuits.get(name)
        if circuit is None:
            return
        self._advance(circuit, now)
        circuit.failures = 0
        circuit.trial_since = None
        match circuit.state:
            case CircuitState.OPEN:
                circuit.until = now
                self._advance(circuit, now)
            case CircuitState.HALF_OPEN:
                circuit.answers += 1
                if circuit.answers >= TRIALS:
                    circuit.state = CircuitState.CLOSED
                    circuit.closed_at = now
            case CircuitState.CLOSED:
                if now - circuit.closed_at > MEMORY_S:
                    del self._circuits[name]

    def sent(self, name: str, now: float) -> float | None:
        """A request goes there. Returns what names it for `ended` when it is the trial."""
        circuit = self._circuits.get(name)
        if circuit is None:
            return None
        self._advance(circuit, now)
        if circuit.state is not CircuitState.HALF_OPEN or self._trying(circuit, now):
            return None
        circuit.trial_since = now
        return now

    def ended(self, name: str, trial: float | None) -> None:
        """A request there is over, however."""
        circuit = self._circuits.get(name)
        if circuit is not None and trial is not None and circuit.trial_since == trial:
            circuit.trial_since = None

    # --- what follows

    def avoided(self, name: str, incarnation: int, now: float) -> bool:
        """Say whether ``name`` is to be left alone at ``now``."""
        circuit = self._circuits.get(name)
        if circuit is None or circuit.incarnation != incarnation:
            return False
        self._advance(circuit, now)
        if circuit.state is CircuitState.HALF_OPEN:
            return self._trying(circuit, now)
        return circuit.state is CircuitState.OPEN

    def describe(self, name: str, incarnation: int, now: float) -> dict[str, object] | None:
        """How it stands with a peer, JSON-able; None where nothing has failed."""
        circuit = self._circuits.get(name)
        if circuit is None or circuit.incarnation != incarnation:
            return None
        self._advance(circuit, now)
        return {
            "state": circuit.state.value,
            "reason": circuit.reason,
            "failures": circuit.failures,
            "openings": circuit.openings,
            "left_s": round(circuit.until - now, 3) if circuit.state is CircuitState.OPEN else 0.0,
        }

    def validate(self) -> None:
        """Check the invariants; raises AssertionError with the broken one."""
        assert len(self._circuits) <= MAX_CIRCUITS
        for circuit in self._circuits.values():
            closed = circuit.state is CircuitState.CLOSED
            assert not closed or circuit.failures < CONFIRMED, "enough failures, and closed"
            assert closed or circuit.openings > 0, "open without an opening"

    def _open(self, circuit: _Circuit, now: float) -> None:
        if circuit.state is CircuitState.CLOSED and now - circuit.closed_at > MEMORY_S:
            circuit.openings = 0
        circuit.state = CircuitState.OPEN
        circuit.openings += 1
        circuit.until = now + min(OPEN_FIRST_S * 2.0 ** min(circuit.openings - 1, 16), OPEN_MAX_S)
        circuit.failures = 0
        circuit.trial_since = None

    @staticmethod
    def _trying(circuit: _Circuit, now: float) -> bool:
        return circuit.trial_since is not None and now - circuit.trial_since < TRIAL_S

    @staticmethod
    def _advance(circuit: _Circuit, now: float) -> None:
        if circuit.state is CircuitState.OPEN and now >= circuit.until:
            circuit.state = CircuitState.HALF_OPEN
            circuit.answers = 0
            circuit.trial_since = None
