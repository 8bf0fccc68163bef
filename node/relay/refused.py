"""A request that nobody runs."""

from __future__ import annotations

from node.plan import Refusal


class Refused(Exception):
    """No node can or would run the request: answer with this refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
