"""Reads the shape of a model from its ``config.json`` (as Hugging Face's transformers write it) and counts its weights.

Counted from the layers' dimensions; norms and biases (below a thousandth) are left out. The size of the checkpoint in
``model.safetensors.index.json``, where it lies beside, is exact and wins. Shapes that are not understood are an error,
never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.sizing.shape import WEIGHT_BYTES, ModelShape, SizingError

#: Largest file read, bytes.
MAX_FILE = 64 * 1024 * 1024
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")

Config = Mapping[str, Any]


def read_model(path: Path, precision: str | None = None) -> ModelShape:
    """The shape of the model in a directory or in a config.json. ``precision`` overrides that of the checkpoint.

    :raises SizingError: there is none, or it is not understood.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _load(file)
    index = file.with_name("model.safetensors.index.json")
    size = 0
    if precision is None and index.is_file():
        size = int((_load(index).get("metadata") or {}).get("total_size") or 0)
    return parse(config, name=path.name if path.is_dir() else path.parent.name, precision=precision, size=size)


def parse(config: Config, *, name: str = "", precision: str | None = None, size: int = 0) -> ModelShape:
    """The shape that a configuration describes.

    :raises SizingError: it is not understood.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):  # a model that sees or hears: its language part
        config = {**config, **text}
    layers, hidden, heads = (_count(config, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kv_heads = _count(config, "num_key_value_heads", heads)
    head_dim = _count(config, "head_dim", hidden // heads)
    latent = _count(config, "kv_lora_rank", 0)
    rope = _count(config, "qk_rope_head_dim", 0)
    experts, moe_layers = _experts(config, layers, hidden)
    routed = next((_count(config, key, 0) for key in _EXPERTS if config.get(key)), 0)
    found, experts_only = _precision(config)
    return ModelShape(
        name=name or str(config.get("model_type") or "model"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        embedding=float(_count(config, "vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)),
        experts=experts,
        dense=float(layers * _attention(config, hidden, heads, kv_heads, head_dim))
        + _dense_mlp(config, layers, moe_layers, hidden),
        active_experts=_count(config, "num_experts_per_tok", 0) / routed if routed else 1.0,
        precision=precision or found,
        experts_only=experts_only and precision is None,
        full_layers=_full_layers(config, layers),
        latent=latent + rope if latent else 0,
        max_len=_count(config, "max_position_embeddings", 0),
        checkpoint_bytes=size,
    )


def _attention(config: Config, hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    latent = _count(config, "kv_lora_rank", 0)
    if not latent:
        return 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    nope, rope, value = (_count(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    low = _count(config, "q_lora_rank", 0)
    query = hidden * low + low * heads * (nope + rope) if low else hidden * heads * (nope + rope)
    return query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _experts(config: Config, layers: int, hidden: int) -> tuple[float, int]:
    """Weights of all routed experts, and the layers that have some."""
    routed = next((_count(config, key, 0) for key in _EXPERTS if config.get(key)), 0)
    if not routed:
        return 0.0, 0
    moe_layers = layers - _count(config, "first_k_dense_replace", 0)
    width = _count(config, "moe_intermediate_size", _count(config, "intermediate_size", 0))
    return float(moe_layers * routed * 3 * hidden * width), moe_layers


def _dense_mlp(config: Config, layers: int, moe_layers: int, hidden: int) -> float:
    """Weights of ordinary feed-forward layers, and of experts that every token uses."""
    plain = (layers - moe_layers) * 3 * hidden * _count(config, "intermediate_size", 0 if moe_layers else None)
    each = _count(config, "shared_expert_intermediate_size", 0) or (
        _count(config, "n_shared_experts", 0) * _count(config, "moe_intermediate_size", 0)
    )
    return float(plain + moe_layers * 3 * hidden * each)


def _full_layers(config: Config, layers: int) -> int:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return layers
    return sum(1 for kind in kinds if kind == "full_attention") or layers


def _precision(config: Config) -> tuple[str, bool]:
    """The name of the weights' precision, and whether it is that of the experts only."""
    quantized = config.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return "bf16", False
    method = str(quantized.get("quant_method"))
    groups = quantized.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    bits = quantized.get("bits") or next((one.get("num_bits") for one in weights if one.get("num_bits")), None)
    if method == "mxfp4":
        return "mxfp4", True
    if method == "fp8" or bits == 8:
        return "fp8", False
    if method in ("awq", "gptq") or bits == 4:
        return "int4", False
    raise SizingError(f"the quantization {method!r} is not known here: say --precision {' or '.join(WEIGHT_BYTES)}")


def _count(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
        raise SizingError(f"config.json: {key} is {value!r}, a whole number was expected; give --parameters instead")
    return value


def _load(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_FILE:
            raise SizingError(f"{file} is larger than any such file")
        value = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SizingError(f"{file} cannot be read ({error.strerror}): give the directory of a model") from error
    except (ValueError, RecursionError) as error:
        raise SizingError(f"{file} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise SizingError(f"{file} holds no object")
    return value
