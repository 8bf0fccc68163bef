"""What the rest of the node needs to know about a client's request."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.chunks import CHUNK_BYTES
from node.prompt.carriage import Carriage
from node.quick import quick

#: Bytes of text per token until a model's own ratio is learnt.
TYPICAL_BYTES_PER_TOKEN = 4.0

#: Tokens assumed for a picture, sound or film in a prompt.
MEDIA_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request. `body` is what the client sent, byte for byte."""

    path: str
    #: None: the client named no model (fine where the cluster serves only one).
    model: str | None
    stream: bool = False
    #: Chained hashes of the full chunks of the (first) prompt; empty where no KV cache is involved.
    chunks: tuple[int, ...] = ()
    #: Length of the canonical text that the chunks were cut from.
    prompt_bytes: int = 0
    #: Prompt tokens of all prompts together: exact for token ids, an estimate for text.
    est_prompt_tokens: int = 0
    exact_tokens: bool = False
    #: Output limit that the client set, per answer; None = up to the engine.
    max_tokens: int | None = None
    body: bytes = field(default=b"", repr=False)
    #: The client sent `kv_transfer_params`: `splice` must strip them.
    has_kv_params: bool = False
    #: The body is a JSON object: our own `kv_transfer_params` can be inserted.
    is_json: bool = False
    #: Prompts in the body, and answers wanted per prompt.
    prompts: int = 1
    answers: int = 1
    #: The body's own `priority`, where it is a whole number (vLLM's meaning: lower is earlier).
    priority: int | None = None
    #: Tokens that the longest prompt has for certain, whatever the tokenizer; 0 = nothing is certain.
    least_tokens: int = 0
    #: A stored response that this request needs (its node is the only one that has it).
    refers_to: str | None = None
    #: How its answer can be carried to another engine; None where that is not our business.
    carriage: Carriage | None = None
    #: It asks for the rest of an answer: its chunks are not those of its body, but of what a client sent.
    continues: bool = False

    @property
    def text_tokens(self) -> int:
        """Prompt tokens per first prompt: what the chunks stand for."""
        return self.est_prompt_tokens if self.prompts == 1 else max(1, self.est_prompt_tokens // self.prompts)

    def tokens(self, bytes_per_token: float = TYPICAL_BYTES_PER_TOKEN) -> int:
        """Prompt tokens of all prompts, with a learnt ratio where they are an estimate."""
        if self.exact_tokens:
            return self.est_prompt_tokens
        return max(0, round(self.est_prompt_tokens * TYPICAL_BYTES_PER_TOKEN / bytes_per_token))

    def matched_tokens(self, chunks: int, tokens: int) -> int:
        """Tokens of the first `chunks` chunks, when all prompts together are `tokens` long."""
        if chunks <= 0 or not self.prompt_bytes:
            return 0
        share = min(1.0, chunks * CHUNK_BYTES / self.prompt_bytes)
        # The last token is always computed: its logits are what we want.
        return max(0, min(int(tokens / self.prompts * share), tokens - 1))


quick(ParsedRequest)
