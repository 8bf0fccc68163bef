"""Reads from vLLM's configuration what the fingerprint needs, and says which engines are refused.

Whatever cannot be found out is left empty, and an empty field matches nothing: the engine then serves without sharing
blocks, which is slow and right.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvmigrate.connector.model_digest import digest_of_model
from kvmigrate.connector.regions import BlockMemory
from kvmigrate.fingerprint import Fingerprint

logger = logging.getLogger("vllm.grapevine")

NONE = "none"
STABLE_HASHES = frozenset({"sha256", "sha256_cbor"})
"""Algorithms whose seed is fixed; the others draw a random seed per process unless PYTHONHASHSEED is set."""


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine cannot take part in migration, in words for its user; empty when it can."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off (--no-enable-prefix-caching), and blocks are found by their prefix hash"
    if vllm_config.speculative_config is not None:
        return "speculative decoding keeps draft KV that the pool does not carry"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism spreads a block's layers over ranks that the pool does not join"
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "data parallelism makes several engines of one, and the pool beside a node is for one"
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return "decode context parallelism spreads a block's tokens over ranks that the pool does not join"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return "the model mixes attention kinds (sliding window, Mamba or others); only full attention migrates"
    return ""


def block_size_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens that one block hash covers."""
    return int(kv_cache_config.hash_block_size or vllm_config.cache_config.block_size)


def fingerprint_of(vllm_config: Any, kv_cache_config: Any, memory: BlockMemory, layer: str) -> Fingerprint:
    """The fingerprint of this worker's blocks. `layer` is the name of one attention layer."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    block_size = block_size_of(vllm_config, kv_cache_config)
    layout = cache.get_resolved_kv_cache_layout()
    return Fingerprint(
        model_digest=_model_digest(vllm_config),
        revision=str(model.revision or NONE),
        dtype=_dtype_name(model.dtype),
        cache_dtype=f"{cache.cache_dtype}:{_dtype_name(spec.dtype)}",
        quantization=str(model.quantization or NONE),
        kv_scales=_kv_scales(cache),
        rope=_rope(model),
        layers=int(model.get_total_num_hidden_layers()),
        kv_heads=int(model.get_total_num_kv_heads()),
        head_dim=int(model.get_head_size()),
        block_size=block_size,
        block_bytes=memory.block_bytes,
        tp_size=int(vllm_config.parallel_config.tensor_parallel_size),
        layout=f"{layout.name}:{memory.layout}" if layout.is_block_compact else "",
        isa=_isa(model, block_size, str(cache.cache_dtype)),
        attention=_attention_backend(vllm_config, layer),
        hash_algo=str(cache.prefix_caching_hash_algo),
        hash_seed=_hash_seed(str(cache.prefix_caching_hash_algo)),
        lora=NONE,  # requests under an adapter do not migrate (scheduler rule 5), and the base model has none
        vllm_version=str(vllm.__version__),
    )


def _model_digest(vllm_config: Any) -> str:
    model = vllm_config.model_config
    # Weights drawn at random follow from the seed and from the shape that the configuration gives them.
    drawn = str(vllm_config.load_config.load_format).endswith("dummy")
    try:
        digest = digest_of_model(_model_directory(str(model.model), model.revision))
        return f"dummy-seed-{model.seed}-{digest}" if drawn and digest else digest
    except Exception as error:  # huggingface_hub raises many kinds; each means "unknown model", which never matches
        logger.warning("cannot identify the model's files (%s): KV blocks will not be shared with peers", error)
        return ""


def _model_directory(model: str, revision: str | None) -> Path:
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_scales(cache: Any) -> str:
    if not str(cache.cache_dtype).startswith("fp8"):
        return NONE
    # Scales from the checkpoint are covered by the model digest; scales computed at run time are known to nobody.
    return "" if getattr(cache, "calculate_kv_scales", False) else "checkpoint"


def _rope(model: Any) -> str:
    config = model.hf_text_config
    values = {
        name: getattr(config, name)
        for name in (
            "rope_parameters",
            "rope_scaling",
            "rope_theta",
            "partial_rotary_factor",
            "max_position_embeddings",
        )
        if getattr(config, name, None) is not None
    }
    return json.dumps(values, sort_keys=True, default=_plain) if values else NONE


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _isa(model: Any, block_size: int, cache_dtype: str) -> str:
    """On CPU the bytes are packed for an instruction set; on a GPU the backend and the layout say everything."""
    if not current_platform.is_cpu():
        return NONE
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype = model.dtype if isinstance(model.dtype, torch.dtype) else torch.bfloat16
    return str(_get_attn_isa(dtype, block_size, model.get_head_size(), cache_dtype))


def _attention_backend(vllm_config: Any, layer: str) -> str:
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    backend = module.get_attn_backend() if module is not None else None
    return str(backend.get_name()) if backend is not None else ""


def _hash_seed(algorithm: str) -> str:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    return NONE if algorithm in STABLE_HASHES else ""
