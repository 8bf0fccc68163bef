"""Several listeners in the place of one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from node.plan import Plan, Refusal
from node.relay.call import Call
from node.relay.carry.lost import Lost
from node.relay.ports import Notes


class Everybody:
    """Implements `node.relay.ports.Notes` by telling each of several."""

    def __init__(self, *listeners: Notes) -> None:
        self._listeners = listeners

    def decided(self, call: Call, plan: Plan | Refusal, seconds: float) -> None:
        """Tell of a decision."""
        for listener in self._listeners:
            listener.decided(call, plan, seconds)

    def retried(self, why: str) -> None:
        """Tell of an attempt without an answer."""
        for listener in self._listeners:
            listener.retried(why)

    def waited(self, seconds: float) -> None:
        """Tell of a stay in the waiting room."""
        for listener in self._listeners:
            listener.waited(seconds)

    def answered(
        self,
        call: Call,
        plan: Plan | None,
        status: int,
        *,
        first_byte_s: float | None,
        told: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Tell of an answer or a refusal."""
        for listener in self._listeners:
            listener.answered(call, plan, status, first_byte_s=first_byte_s, told=told)

    def denied(self, why: str) -> None:
        """Tell of a refusal for want of a place or of time."""
        for listener in self._listeners:
            listener.denied(why)

    def carried(self, lost: Lost, seconds: float, failed: str) -> None:
        """Tell of a stream that was carried on, or could not be."""
        for listener in self._listeners:
            listener.carried(lost, seconds, failed)

    def broke(self, call: Call, plan: Plan, why: str) -> None:
        """Tell of an answer that broke off."""
        for listener in self._listeners:
            listener.broke(call, plan, why)
