"""Everything that must be equal for the bytes of a KV block to mean the same in two engines.

vLLM's block hash covers the tokens and their extra keys, and nothing of the model. This covers the rest.

Rules:
1. A field that could not be found out stays empty, and a fingerprint with an empty field matches nothing, itself
   included: a wrong "equal" costs wrong answers, a wrong "different" only a recompute.
2. "There is none" is a value and is spelled `none` (no quantization, no LoRA, no RoPE override).
3. Any change of the set of fields changes every digest (the field names are hashed), so two versions never agree by
   accident.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from .layout import FINGERPRINT_BYTES

#: The digest of an incomplete fingerprint. Nobody treats it as equal to anything.
NO_FINGERPRINT: Final = bytes(FINGERPRINT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a block's bytes depend on besides its hash. All fields are required; empty or 0 = unknown."""

    model_digest: str = ""  #: digest of the weights' content
    revision: str = ""  #: revision of the model, `none` for a local directory
    dtype: str = ""  #: activations, e.g. bfloat16
    cache_dtype: str = ""  #: KV cache, e.g. auto, fp8_e4m3
    quantization: str = ""  #: method, or none
    kv_scales: str = ""  #: where fp8 k/v scales come from, or none
    rope: str = ""  #: RoPE parameters in a canonical spelling
    layers: int = 0
    kv_heads: int = 0  #: in the whole model, not per rank
    head_dim: int = 0
    block_size: int = 0  #: tokens a block
    block_bytes: int = 0  #: bytes a block of one rank
    tp_size: int = 0
    layout: str = ""  #: vLLM's KV layout name, e.g. LBHNC
    isa: str = (
        ""  #: attention instruction set that the bytes are packed for; `none` where packing does not depend on it
    )
    attention: str = ""  #: attention backend
    hash_algo: str = ""  #: of block hashes
    hash_seed: str = ""  #: of block hashes; `none` for the algorithm's fixed seed
    lora: str = ""  #: digest over the contents of all loaded adapters, or none
    vllm_version: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the fields that are unknown."""
        return tuple(f.name for f in fields(self) if not getattr(self, f.name))

    @property
    def complete(self) -> bool:
        """Whether every field is known; only then blocks may be shared."""
        return not self.missing

    def digest(self) -> bytes:
        """Return 16 bytes that are equal only for equal complete fingerprints; NO_FINGERPRINT if incomplete."""
        if not self.complete:
            return NO_FINGERPRINT
        h = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"gv-fingerprint")
        for f in fields(self):
            for part in (f.name, str(getattr(self, f.name))):
                raw = part.encode()
                h.update(len(raw).to_bytes(4, "big"))
                h.update(raw)
        return h.digest()

    def matches(self, other: Fingerprint) -> bool:
        """Whether blocks may be exchanged; False if either is incomplete."""
        return matching(self.digest(), other.digest())

    def to_fields(self) -> dict[str, str | int]:
        """Return the readable fields, as sent in the engine link's hello."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_fields(cls, values: Mapping[str, object]) -> Fingerprint:
        """Build from a received map; what is unknown or of the wrong type is left empty, so it cannot match."""
        known: dict[str, object] = {}
        for f in fields(cls):
            value = values.get(f.name)
            if type(value) is type(f.default):
                known[f.name] = value
        return cls(**known)  # type: ignore[arg-type]


def matching(ours: bytes, theirs: bytes) -> bool:
    """Whether two fingerprint digests allow an exchange of blocks."""
    return ours == theirs and ours != NO_FINGERPRINT and len(ours) == FINGERPRINT_BYTES


def differences(ours: Mapping[str, str | int], theirs: Mapping[str, str | int]) -> str:
    """Say in which readable fields two fingerprints differ: "block_size is 64 there and 128 here".

    So do those that neither side knows: they match nothing.
    """
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name) or not ours.get(name)]
    if not ours or not theirs or not names:
        return "the blocks there are of another model or engine configuration"
    told = (f"{name} is {_shown(theirs.get(name))} there and {_shown(ours.get(name))} here" for name in names)
    return ", ".join(told)


def _shown(value: str | int | None) -> str:
    return "unknown" if value in {None, "", 0} else str(value)
