"""A trace made small enough for this machine: fewer conversations, shorter prompts, faster time, real bodies.

A prompt's text is a function of its blocks: equal blocks are equal text, so every router sees the same prefixes.
One token of the replay stands for `Scale.coarse` tokens of the trace, in the prompts, in the answers and in the
engines (`grapevine emulate --coarse`), which take as long for it. All times are divided by the same number, those of
the arrivals and those of the engines, the latter so that the load is the one that is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson

from benches import traces
from benches.emulated_cluster import MODEL
from benches.traces import BLOCK_TOKENS, UNSHARED, Arrival

#: Engines that the scales are made for.
NODES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Which part of a trace is replayed, and how small. Tokens and seconds are those of the trace."""

    #: Seconds from the trace's start on, seconds taken, and the share of the conversations in them.
    start: float
    seconds: float
    share: float
    #: Tokens that one token of the replay stands for; divides a block's 512.
    coarse: int
    #: KV cache of one engine, and the longest prompt: longer ones are left out.
    kv_tokens: int
    longest: int
    #: Seconds that the arrivals are replayed in.
    real_s: float

    def before(self, nodes: int) -> Scale:
        """For so many engines: as many conversations for each."""
        return replace(self, share=min(1.0, self.share * nodes / NODES))

    def shortened(self, real_s: float) -> Scale:
        """A shorter replay: less of the trace at the same pace."""
        return replace(self, seconds=self.seconds * real_s / self.real_s, real_s=real_s)

    def slower(self, times: float) -> Scale:
        """The same replay in so many times the time: for a machine that has other things to do."""
        return replace(self, real_s=self.real_s * times)


#: Traces by name. Caches are as small beside what passes through them as 1M tokens a node are beside the whole trace.
#: Of claude_code twice as much is sent: in 600 s of it six requests are the 99th percentile, most of them cold prompts.
SCALES = {
    "conversation": Scale(start=600, seconds=720, share=1 / 3, coarse=8, kv_tokens=1 << 18, longest=126_000, real_s=60),
    "claude_code": Scale(
        start=6000, seconds=1200, share=0.5, coarse=16, kv_tokens=1 << 19, longest=200_000, real_s=120
    ),
}
SCALES[UNSHARED] = SCALES["conversation"]
#: For a trace that is a file of the user's own.
OTHER = Scale(start=0, seconds=720, share=1.0, coarse=8, kv_tokens=1 << 18, longest=126_000, real_s=60)


@dataclass(frozen=True, slots=True)
class Shot:
    """One request of the replay: seconds after the start at which it is sent, and its body."""

    at: float
    body: bytes


def cut(arrivals: Sequence[Arrival], scale: Scale) -> list[Arrival]:
    """The part of the trace that is replayed, in the trace's own seconds and tokens."""
    return traces.part(arrivals, start=scale.start, seconds=scale.seconds, share=scale.share, longest=scale.longest)


def shots(arrivals: Sequence[Arrival], scale: Scale) -> list[Shot]:
    """The requests to send."""
    faster = scale.seconds / scale.real_s
    return [Shot(arrival.at / faster, _body(number, arrival, scale)) for number, arrival in enumerate(arrivals)]


def _body(number: int, arrival: Arrival, scale: Scale) -> bytes:
    fields = {
        "model": MODEL,
        "prompt": prompt_text(number, arrival, scale.coarse),
        "max_tokens": answer_tokens(arrival, scale.coarse),
        "ignore_eos": True,
        "stream": True,
    }
    return orjson.dumps(fields)


def answer_tokens(arrival: Arrival, coarse: int) -> int:
    """Tokens of the replay's answer."""
    return max(1, round(arrival.output / coarse))


def prompt_text(number: int, arrival: Arrival, coarse: int) -> str:
    """The prompt of the request number `number`: the text of its blocks, then what is its own."""
    text = [block_text(f"block {block}", BLOCK_TOKENS // coarse) for block in arrival.blocks]
    rest = (arrival.tokens - len(arrival.blocks) * BLOCK_TOKENS) // coarse
    return "".join(text) + block_text(f"rest {number}", max(1, rest))


def block_text(name: str, tokens: int) -> str:
    """So many tokens of the emulated engine (a blank and four characters each), the same ones for the same name."""
    letters = hashlib.shake_128(name.encode()).hexdigest(2 * tokens)
    return " " + " ".join(letters[start : start + 4] for start in range(0, len(letters), 4))
