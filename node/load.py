"""The load vector: what a node tells every other node about itself, a few times a second.

Promises
1. Encoded it is at most `GOAL_BYTES` long, however many peers there are: round trips and rates that do not
   fit are left out, the last ones of the mapping first. A datagram of rows has to carry many of them; how far other
   pairs are apart is known from the network coordinates (`gossip.coordinates`).
2. `decode` raises `RemoteError` and nothing else; every number it returns is finite and within its range.
3. A rate or latency of 0 means "not measured yet", and `samples` says how many recent requests the measured ones
   rest on. The reader mixes them with what is typical among the peers (`node.view.Typical`), the more the fewer
   they are, so that a new node is neither shunned nor flooded.
4. Rows of older versions are read: a plain rate stands for all lengths, its queue is tokens over that rate, and what
   they measured counts fully.

Age and sequence number travel beside the vector (gossip rows carry both).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from node.errors import LocalError, RemoteError
from node.prefill import MAX_TERM_MS, UNMEASURED, PrefillTime
from node.quick import quick
from node.wire import NAME, flag, integer, number, pack, unpack_map
from node.wire import name as node_name

#: How long our own encoded vector gets, and the longest one that is read.
GOAL_BYTES = 320
MAX_BYTES = 1024

#: Ranges, far beyond anything real: they keep arithmetic on foreign numbers finite.
MAX_COUNT = 1_000_000
MAX_TOKENS = 1_000_000_000
MAX_RATE = 1e15
MAX_MS = 1e9

#: Samples from which on measured numbers are taken to be right.
FULLY = 100.0

_VERSION = 1


@dataclass(frozen=True, slots=True)
class LoadVector:
    """One node's own measurements. Latencies in milliseconds, rates per second; 0 = not measured."""

    #: The engine answers and admits requests.
    ready: bool = False
    #: The node finishes what it has and takes nothing new.
    draining: bool = False
    #: Requests that the engine computes now, and requests that wait in front of it.
    running: int = 0
    waiting: int = 0
    #: Requests the engine computes at once; more of them wait. 0 = unknown.
    slots: int = 0
    #: Prompt tokens that still have to be computed for admitted requests (cached ones not counted).
    queued_tokens: int = 0
    #: Signs of life of the engine (steps, tokens, starts), counted round at `MAX_TOKENS`: only a change says something.
    moves: int = 0
    #: Share of the KV cache that running requests hold, 0..1.
    kv_use: float = 0.0
    #: `queued_tokens` in milliseconds, as the node itself expects it: it knows how long each of these prompts is.
    queued_ms: float = 0.0
    #: Recent finished requests that the rates and latencies rest on; what is older counts less.
    samples: float = FULLY
    #: How long a prompt takes to compute; tokens per second of one decoding stream.
    prefill: PrefillTime = UNMEASURED
    decode_tps: float = 0.0
    #: Over the last 100 requests: time to first token, mean gap between tokens, whole request.
    ttft_p50_ms: float = 0.0
    ttft_p95_ms: float = 0.0
    itl_p50_ms: float = 0.0
    itl_p95_ms: float = 0.0
    e2e_p50_ms: float = 0.0
    e2e_p95_ms: float = 0.0
    #: Latency vector: round trip to each peer in milliseconds, and bytes per second of KV pulled from it.
    rtts: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    #: Bytes per second at which the engine copies KV out of the pool into its own cache.
    copy_rate: float = 0.0

    @property
    def active(self) -> int:
        """Requests the node has admitted and not finished."""
        return self.running + self.waiting

    @property
    def prompts(self) -> int:
        """Requests whose prompt is not computed yet: those that wait, and one more while a prompt is being computed."""
        return self.waiting + (self.queued_ms > 0)

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens computed per second, for a prompt of usual length; 0 = not measured."""
        return self.prefill.tokens_per_s()

    def encode(self) -> bytes:
        """Pack into at most `GOAL_BYTES`; mappings are cut to what fits, keeping their first entries."""
        base = pack({**self._fields(), "r": {}, "b": {}})
        # Each map may grow from a 1-byte to a 3-byte header.
        room = GOAL_BYTES - len(base) - 4
        # Half of the room each, and what one of them leaves over to the other.
        _, spared = _fitting(self.rates.items(), room // 2)
        rtts, left = _fitting(self.rtts.items(), room - room // 2 + spared)
        rates, _ = _fitting(self.rates.items(), room // 2 - spared + left)
        return pack({**self._fields(), "r": rtts, "b": rates})

    def _fields(self) -> dict[str, object]:
        values: dict[str, object] = {"v": _VERSION, "ok": self.ready, "dr": self.draining}
        for key, attribute in _COUNTS.items():
            values[key] = int(getattr(self, attribute))
        for key, (attribute, high) in _REALS.items():
            value = min(high, float(getattr(self, attribute)))
            if value or key in _TOLD_AT_ZERO:
                values[key] = value
        if self.prefill.measured:
            values["pt"] = [self.prefill.fixed_ms, self.prefill.token_ms, self.prefill.pair_ms]
        return values


quick(LoadVector)


#: Wire key -> attribute; one and two letters keep the vector small.
_COUNTS = {"ru": "running", "wa": "waiting", "sl": "slots", "qt": "queued_tokens", "mv": "moves"}
_COUNT_LIMIT = {"ru": MAX_COUNT, "wa": MAX_COUNT, "sl": MAX_COUNT, "qt": MAX_TOKENS, "mv": MAX_TOKENS}
_REALS = {
    "kv": ("kv_use", 1.0),
    "qm": ("queued_ms", MAX_MS),
    "sa": ("samples", FULLY),
    "pf": ("prefill_tps", MAX_RATE),
    "de": ("decode_tps", MAX_RATE),
    "t5": ("ttft_p50_ms", MAX_MS),
    "t9": ("ttft_p95_ms", MAX_MS),
    "i5": ("itl_p50_ms", MAX_MS),
    "i9": ("itl_p95_ms", MAX_MS),
    "e5": ("e2e_p50_ms", MAX_MS),
    "e9": ("e2e_p95_ms", MAX_MS),
    "cr": ("copy_rate", MAX_RATE),
}
#: Where a row does not say it, it is of an older version, which means something else than 0.
_TOLD_AT_ZERO = ("qm", "sa")


def _fitting(items: Iterable[tuple[str, float]], room: int) -> tuple[dict[str, float], int]:
    """The first items that fit into `room` bytes, and the room left."""
    kept: dict[str, float] = {}
    for peer, value in items:
        if NAME.fullmatch(peer) is None:
            raise LocalError(f"{peer!r} is no node name")
        size = (1 if len(peer) < 32 else 2) + len(peer) + 5  # string header, name, single precision float
        if size > room:
            break
        kept[peer] = float(value)
        room -= size
    return kept, room


def decode(data: bytes) -> LoadVector:
    """The vector in `data`. Raises `RemoteError` when it is too long, malformed or out of range."""
    fields = unpack_map(data, MAX_BYTES, "load vector")
    integer(fields, "v", 1, 1 << 16)  # newer versions only add keys
    counts = {attribute: integer(fields, key, 0, _COUNT_LIMIT[key], 0) for key, attribute in _COUNTS.items()}
    reals = {attribute: number(fields, key, 0.0, high, 0.0) for key, (attribute, high) in _REALS.items()}
    prefill = _prefill(fields) if "pt" in fields else PrefillTime.of_rate(reals["prefill_tps"])
    return LoadVector(
        ready=flag(fields, "ok"),
        draining=flag(fields, "dr"),
        running=counts["running"],
        waiting=counts["waiting"],
        slots=counts["slots"],
        queued_tokens=counts["queued_tokens"],
        moves=counts["moves"],
        kv_use=reals["kv_use"],
        queued_ms=reals["queued_ms"] if "qm" in fields else _queued_ms(counts["queued_tokens"], prefill),
        samples=reals["samples"] if "sa" in fields else FULLY,
        prefill=prefill,
        decode_tps=reals["decode_tps"],
        ttft_p50_ms=reals["ttft_p50_ms"],
        ttft_p95_ms=reals["ttft_p95_ms"],
        itl_p50_ms=reals["itl_p50_ms"],
        itl_p95_ms=reals["itl_p95_ms"],
        e2e_p50_ms=reals["e2e_p50_ms"],
        e2e_p95_ms=reals["e2e_p95_ms"],
        rtts=_peer_numbers(fields, "r", MAX_MS),
        rates=_peer_numbers(fields, "b", MAX_RATE),
        copy_rate=reals["copy_rate"],
    )


def _prefill(fields: Mapping[str, object]) -> PrefillTime:
    given = fields["pt"]
    if not isinstance(given, list) or len(given) != len(PrefillTime._fields):
        raise RemoteError("pt: no three numbers")
    values = dict(zip(PrefillTime._fields, given, strict=True))
    return PrefillTime(*(number(values, name, 0.0, MAX_TERM_MS) for name in values))


def _queued_ms(tokens: int, prefill: PrefillTime) -> float:
    return min(MAX_MS, tokens * prefill.token_ms)


def _peer_numbers(fields: Mapping[str, object], key: str, high: float) -> dict[str, float]:
    raw = fields.get(key, {})
    if not isinstance(raw, dict):
        raise RemoteError(f"{key}: no map")
    return {node_name(peer, key): number({key: value}, key, 0.0, high) for peer, value in raw.items()}
