"""What a node serves: one record per model, published as slow state under the key `model/<id>`.

The union of all records is what `/v1/models` of any node shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from xxhash import xxh3_128_hexdigest

from node.errors import LocalError, RemoteError
from node.wire import MAX_MODEL_ID, integer, pack, text, unpack_map

#: Slow-state key prefix of model records.
KEY_PREFIX = b"model/"

#: Gossip's limits for one entry of slow state, in bytes.
MAX_KEY_BYTES = 64
MAX_VALUE_BYTES = 1024

#: Longest context that we believe, in tokens.
MAX_MODEL_LEN = 1 << 30
#: Largest KV cache that we believe, in tokens.
MAX_KV_TOKENS = 1 << 40

Kind = Literal["base", "adapter"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model as one node serves it."""

    #: The name that requests use.
    id: str
    kind: Kind = "base"
    #: Longest prompt plus output, in tokens; 0 = not known (never excludes the node).
    max_model_len: int = 0
    #: What was loaded (path or hub name); for an adapter its own path.
    root: str = ""
    #: The base model of an adapter.
    parent: str = ""
    revision: str = ""
    #: Tokens in a KV block; 0 = no KV can be moved.
    block_size: int = 0
    #: Bytes of KV per token, over all layers and ranks; 0 = not known.
    kv_token_bytes: int = 0
    #: Digest of everything that must be equal for KV blocks to be interchangeable; empty = never pull.
    fingerprint: bytes = b""
    #: Tokens that the KV cache holds; 0 = not known.
    kv_tokens: int = 0
    #: When the model was created, in seconds of the engine's answer (shown in /v1/models only).
    created: int = 0

    @property
    def key(self) -> bytes:
        """The slow-state key. Long identifiers are replaced by their digest: the value holds the name."""
        return model_key(self.id)

    def encode(self) -> bytes:
        """Pack for slow state. Raises `LocalError` when a name is too long to be published."""
        if not self.id or len(self.id.encode()) > MAX_MODEL_ID:
            raise LocalError(f"the model name {self.id[:40]!r} is empty or longer than {MAX_MODEL_ID} bytes")
        # A long path is shown shortened: nothing is decided by it.
        root = self.root.encode("utf-8", "replace")[-MAX_MODEL_ID:].decode("utf-8", "ignore")
        value = pack(
            {
                "id": self.id,
                "k": self.kind,
                "n": self.max_model_len,
                "ro": root,
                "pa": self.parent,
                "re": self.revision,
                "bs": self.block_size,
                "kb": self.kv_token_bytes,
                "fp": self.fingerprint,
                "kt": self.kv_tokens,
                "c": self.created,
            }
        )
        if len(value) > MAX_VALUE_BYTES:
            raise LocalError(f"the record of model {self.id!r} does not fit into {MAX_VALUE_BYTES} bytes")
        return value


def model_key(model_id: str) -> bytes:
    """The slow-state key of a model."""
    raw = KEY_PREFIX + model_id.encode()
    if len(raw) <= MAX_KEY_BYTES:
        return raw
    return KEY_PREFIX + b"#" + xxh3_128_hexdigest(raw).encode()


def decode(data: bytes) -> ModelInfo:
    """The record in `data`. Raises `RemoteError` when it is malformed or out of range."""
    fields = unpack_map(data, MAX_VALUE_BYTES, "model record")
    kind = fields.get("k", "base")
    if kind not in ("base", "adapter"):
        raise RemoteError("model record: unknown kind")
    fingerprint = fields.get("fp", b"")
    if not isinstance(fingerprint, bytes) or len(fingerprint) > 64:
        raise RemoteError("model record: bad fingerprint")
    model_id = text(fields, "id", MAX_MODEL_ID)
    if not model_id:
        raise RemoteError("model record: no name")
    return ModelInfo(
        id=model_id,
        kind="adapter" if kind == "adapter" else "base",
        max_model_len=integer(fields, "n", 0, MAX_MODEL_LEN, 0),
        root=text(fields, "ro", MAX_MODEL_ID, ""),
        parent=text(fields, "pa", MAX_MODEL_ID, ""),
        revision=text(fields, "re", MAX_MODEL_ID, ""),
        block_size=integer(fields, "bs", 0, 1 << 20, 0),
        kv_token_bytes=integer(fields, "kb", 0, 1 << 40, 0),
        fingerprint=fingerprint,
        kv_tokens=integer(fields, "kt", 0, MAX_KV_TOKENS, 0),
        created=integer(fields, "c", 0, 1 << 40, 0),
    )


def catalogue(slow: Mapping[bytes, bytes]) -> dict[str, ModelInfo]:
    """The models in one node's slow state, by id. Records that cannot be read are left out."""
    models: dict[str, ModelInfo] = {}
    for key, value in slow.items():
        if not key.startswith(KEY_PREFIX):
            continue
        try:
            info = decode(value)
        except RemoteError:
            continue
        if info.key == key:
            models[info.id] = info
    return models


def union(catalogues: Iterable[Mapping[str, ModelInfo]]) -> dict[str, object]:
    """The answer to `GET /v1/models`: every model once, with the longest context that any node offers."""
    best: dict[str, ModelInfo] = {}
    for models in catalogues:
        for model_id, info in models.items():
            known = best.get(model_id)
            if known is None or info.max_model_len > known.max_model_len:
                best[model_id] = info
    return {"object": "list", "data": [_card(best[model_id]) for model_id in sorted(best)]}


def _card(info: ModelInfo) -> dict[str, object]:
    return {
        "id": info.id,
        "object": "model",
        "created": info.created,
        "owned_by": "vllm",
        "root": info.root or info.id,
        "parent": info.parent or None,
        "max_model_len": info.max_model_len or None,
    }
