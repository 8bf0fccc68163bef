"""The state of one request inside the emulated engine."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from node.emulator.job import Job


@dataclass(slots=True, eq=False)
class Sequence:
    """A job and how far it is. A step that leaves nothing missing emits one more token of the answer."""

    job: Job
    #: Tokens of prompt and answer that are computed and in blocks.
    computed: int = 0
    #: Tokens of the answer that are out.
    emitted: int = 0
    #: Keys of its blocks that have one, from the first on, and the number of its other blocks.
    held: list[Hashable] = field(default_factory=list)
    private: int = 0
    #: Blocks before this index were looked at for publishing.
    seen: int = 0
    started: bool = False
    aborted: bool = False
    #: Blocks being loaded from the node's pool, and blocks that came; a load is offered once until preempted.
    loading: int = 0
    loaded: int = 0
    load_tried: bool = False

    @property
    def known(self) -> int:
        """Tokens that are there to be computed: the prompt and what was emitted."""
        return self.job.prompt_tokens + self.emitted

    @property
    def missing(self) -> int:
        """Of these, tokens not computed yet."""
        return self.job.prompt_tokens + self.emitted - self.computed

    @property
    def decodes(self) -> bool:
        """Only its newest token is to be computed."""
        return self.emitted > 0 and self.missing == 1

    @property
    def left(self) -> int:
        """Tokens of the answer still to come."""
        return self.job.output_tokens - self.emitted

    @property
    def blocks(self) -> int:
        """Blocks that it holds."""
        return len(self.held) + self.private
