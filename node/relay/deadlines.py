"""How long each wait on an engine or a peer may last. There is no total: a long stream is never cut by us.

The first byte of an answer is waited for as long as its target is likely to need, many times over: what its own
measurements say about its queue, its prefill and its usual time to first token. A target that has measured nothing yet
may be loading weights into a cache or compiling: it gets `cold_s`. After that it still gets more time while its engine
shows life (`node.relay.patience`).
"""

from __future__ import annotations

from dataclasses import dataclass

from node.load import LoadVector
from node.prompt import ParsedRequest

#: Tokens of an answer without a limit, where the context of the model is not known.
UNKNOWN_ANSWER = 32_768
#: Gap between two tokens of an engine that has measured none, milliseconds.
PRIOR_GAP_MS = 50.0
_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds; each field bounds one kind of wait."""

    #: To open a connection. A live peer answers within a few round trips; raise it on links over a second.
    connect_s: float = 3.0
    #: Least time granted until the first byte, whatever the prediction says.
    first_byte_s: float = 5.0
    #: The same for a target that has not measured a prefill yet.
    cold_s: float = 120.0
    #: Times the expected time to the first token that is granted: predictions are rough, and prefill gets slower with
    #: the length of a prompt.
    first_byte_factor: float = 8.0
    #: The same for the decoding of an answer that is not streamed: its first byte comes after its last token.
    answer_factor: float = 3.0
    #: Most that is ever granted for the first byte.
    first_byte_max_s: float = 1800.0
    #: Between two pieces of an answer, the client's slowness included.
    idle_s: float = 300.0
    #: For the whole of a small exchange between nodes (probe, drain, pull hint).
    exchange_s: float = 5.0

    def first_byte(self, parsed: ParsedRequest, load: LoadVector, *, predicted_ms: float, prompt_tokens: int) -> float:
        """Seconds to wait for a sign of life of a target with this ``load``.

        ``predicted_ms`` is what the decision expected until the first token. Blocks that were counted on may be gone,
        so the whole prompt counts as well.
        """
        tps = load.prefill_tps
        expected_ms = predicted_ms + load.ttft_p95_ms + (prompt_tokens / tps * _MS if tps > 0 else 0.0)
        least = self.first_byte_s if tps > 0 or load.ttft_p95_ms > 0 else self.cold_s
        wanted = self.first_byte_factor * expected_ms / _MS
        if not parsed.stream:
            wanted += self.answer_factor * _answer_ms(parsed, load) / _MS
        return min(max(least, wanted), self.first_byte_max_s)


def _answer_ms(parsed: ParsedRequest, load: LoadVector) -> float:
    if parsed.est_prompt_tokens == 0:
        return 0.0  # nothing is generated
    gap_ms = load.itl_p95_ms or (_MS / load.decode_tps if load.decode_tps > 0 else PRIOR_GAP_MS)
    return gap_ms * (UNKNOWN_ANSWER if parsed.max_tokens is None else parsed.max_tokens)
