"""What an emulated engine is like: its limits and how long its steps take. Frozen; presets by name.

The time of one step is linear in what the step does:

    step = step_s
         + sum over prefill chunks of c tokens behind o computed ones:  c * prefill_s + c * (o + c/2) * attention_s
         + d decoding sequences:                                        d * decode_s
         + context tokens of the decoding sequences together:           context * context_s

The form follows from what a transformer computes (weights once a step, each token through them, attention over what
lies before). The constants are fitted, see docs/emulator.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from node.errors import LocalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds. All are at least 0, and `step_s` above 0, so that time always advances."""

    #: Once a step, whatever it does.
    step_s: float
    #: Per prompt token computed, and per pair of a prompt token with one before it.
    prefill_s: float
    attention_s: float = 0.0
    #: Per decoding sequence, and per token of context that it attends to.
    decode_s: float = 0.0
    context_s: float = 0.0
    #: Between a request's arrival and the scheduler seeing it: fixed, and per prompt token (tokenizing, copying).
    accept_s: float = 0.0
    accept_token_s: float = 0.0
    #: Taking one KV block out of the node's pool.
    load_block_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < 3600:
                raise LocalError(f"timing: {name} must be between 0 and 3600 seconds")
        if self.step_s <= 0:
            raise LocalError("timing: step_s must be above 0")

    def prefill(self, computed: int, tokens: int) -> float:
        """Seconds that a chunk of `tokens` behind `computed` ones adds to a step."""
        return tokens * (self.prefill_s + (computed + tokens / 2) * self.attention_s)

    def decode(self, sequences: int, context: int) -> float:
        """Seconds that decoding one token each adds to a step; `context` is that of all sequences together."""
        return sequences * self.decode_s + context * self.context_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits under the names that vLLM gives them, in comments where ours differ."""

    name: str
    timing: Timing
    #: Tokens in a KV block (block_size), tokens that the KV cache holds (blocks * block_size).
    block_size: int = 16
    kv_tokens: int = 65_536
    #: Requests computed at once; tokens computed in one step (max_num_batched_tokens).
    max_num_seqs: int = 256
    step_tokens: int = 8192
    max_model_len: int = 8192
    #: Bytes of KV per token of the model that is imitated: what migrating a token would cost.
    kv_token_bytes: int = 131_072
    enable_prefix_caching: bool = True
    #: The least room that a preset must have; a prompt of max_model_len must fit.
    blocks: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.max_num_seqs < 1 or self.max_model_len < 1:
            raise LocalError("block_size, max_num_seqs and max_model_len must be at least 1")
        if self.step_tokens < self.max_num_seqs:
            raise LocalError("step_tokens must be at least max_num_seqs: every sequence decodes one token a step")
        object.__setattr__(self, "blocks", self.kv_tokens // self.block_size)
        if self.blocks * self.block_size < self.max_model_len:
            raise LocalError(
                f"kv_tokens {self.kv_tokens} is less than one request of max_model_len {self.max_model_len} needs"
            )


#: SmolLM2-135M on one CPU core, bf16: prefill 370-660 tokens/s falling with length, decode 34 tokens/s.
SMOLLM2_CPU = EngineConfig(
    name="smollm2-cpu",
    timing=Timing(
        step_s=0.0255,
        prefill_s=1.9e-3,
        attention_s=6.0e-7,
        decode_s=2.0e-3,
        context_s=8.0e-6,
        accept_s=0.012,
        accept_token_s=4.0e-6,
        load_block_s=2.5e-3,
    ),
    block_size=128,
    kv_tokens=46_592,  # 1 GiB at 23,040 bytes a token, in whole blocks of 128
    max_num_seqs=256,
    step_tokens=2048,
    max_model_len=4096,
    kv_token_bytes=23_040,
)

#: An 8B model with grouped-query attention on one data-centre GPU: 16 GFLOP a token at about 300 TFLOP/s, 16 GB of
#: weights at about 2.5 TB/s a decode step, 128 KiB of KV a token. From these numbers, not measured here.
GPU_8B = EngineConfig(
    name="8b-gpu",
    timing=Timing(
        step_s=0.0075,
        prefill_s=5.0e-5,
        attention_s=1.7e-9,
        decode_s=3.0e-5,
        context_s=5.2e-8,
        accept_s=0.004,
        accept_token_s=2.5e-7,
        load_block_s=1.0e-4,
    ),
    block_size=16,
    kv_tokens=1 << 20,
    max_num_seqs=256,
    step_tokens=8192,
    max_model_len=131_072,
    kv_token_bytes=131_072,
)

PRESETS: dict[str, EngineConfig] = {config.name: config for config in (SMOLLM2_CPU, GPU_8B)}


def coarser(config: EngineConfig, tokens: int) -> EngineConfig:
    """The same engine where one token stands for `tokens` of its own: for long traces on a small machine.

    Limits shrink, times grow, so that a prompt with so many tokens less takes as long as before; what is once a step is
    paid once for all the tokens that a decoding sequence makes in it. Raises `LocalError`.
    """
    one = config.timing
    timing = replace(
        one,
        step_s=one.step_s * tokens,
        prefill_s=one.prefill_s * tokens,
        attention_s=one.attention_s * tokens * tokens,
        decode_s=one.decode_s * tokens,
        context_s=one.context_s * tokens * tokens,
        accept_token_s=one.accept_token_s * tokens,
        load_block_s=one.load_block_s * tokens,
    )
    step_tokens = config.step_tokens // tokens
    return replace(
        config,
        timing=timing,
        kv_tokens=config.kv_tokens // tokens,
        step_tokens=step_tokens,
        max_num_seqs=min(config.max_num_seqs, step_tokens),
        max_model_len=config.max_model_len // tokens,
        kv_token_bytes=config.kv_token_bytes * tokens,
    )


def preset(name: str, **changed: object) -> EngineConfig:
    """A preset, with fields replaced. Raises `LocalError`."""
    config = PRESETS.get(name)
    if config is None:
        raise LocalError(f"unknown preset {name!r}; known are {', '.join(sorted(PRESETS))}")
    return adjusted(config, **changed)


def adjusted(config: EngineConfig, **changed: object) -> EngineConfig:
    """The same with fields replaced; None leaves one as it is. Raises `LocalError`."""
    given = {key: value for key, value in changed.items() if value is not None}
    return replace(config, **given)  # type: ignore[arg-type]
