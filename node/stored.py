"""Which node's engine stored which response (the responses API keeps them in the engine's memory).

A node remembers what passed through it: the id in the answer to `POST /v1/responses`, and who ran it. It is a hint with
a bound, not a store: an id that this node never saw, or has forgotten, is asked for wherever the policy says, and the
engine there answers that it does not know it.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from node.prompt import ParsedRequest

#: Responses remembered, the ones used last; and the longest id.
MAX_STORED = 16_384
MAX_ID = 128
#: How far into an answer its id is looked for, bytes: it is the first field of a whole answer and of the first event.
_LOOKED_AT = 4096
_PATH = "/v1/responses"
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,%d})"' % (MAX_ID - 5))


class StoredResponses:
    """Response id -> node."""

    def __init__(self, limit: int = MAX_STORED) -> None:
        self._limit = limit
        self._owners: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def answered(self, parsed: ParsedRequest, target: str, first: bytes) -> None:
        """`target` ran a request; `first` is the first piece of its answer."""
        if _PATH not in parsed.path or parsed.path.rstrip("/") != _PATH:
            return
        found = _ID.search(first[:_LOOKED_AT])
        if found is None:
            return
        self._owners[found[1].decode()] = target
        self._owners.move_to_end(found[1].decode())
        while len(self._owners) > self._limit:
            self._owners.popitem(last=False)

    def owner(self, parsed: ParsedRequest) -> str | None:
        """The node that stored what this request refers to; None when it refers to nothing, or nothing known here."""
        if parsed.refers_to is None:
            return None
        owner = self._owners.get(parsed.refers_to)
        if owner is not None:
            self._owners.move_to_end(parsed.refers_to)
        return owner
