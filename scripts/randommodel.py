"""Llama models with random weights, made on the spot: only a configuration, and the tokenizer of the default model.

Engines load them with `--load-format dummy`: vLLM draws the weights from the seed, so every engine has the same ones.
What they answer means nothing, and depends on every token before it.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from node.model_store import ensure_default_model

ENGINE_ARGS = ("--load-format", "dummy")
Shape = Mapping[str, int]

TINY: Shape = {"hidden_size": 256, "intermediate_size": 512, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64}
"""Starts as fast as vLLM can start. Its heads can be shared by two ranks, those of SmolLM2-135M (9 and 3) cannot."""
LARGER: Shape = {
    "hidden_size": 960,
    "intermediate_size": 2560,
    "layers": 32,
    "heads": 15,
    "kv_heads": 5,
    "head_dim": 64,
}
"""The shape of SmolLM2-360M: 2.7 times the default model's parameters, 1.8 times its bytes of KV a token."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_model(directory: Path, shape: Shape) -> Path:
    """Write a model directory and return it. Fetches the default model where it is not here yet."""
    default = ensure_default_model(lambda text: None)
    directory.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        shutil.copy(default / name, directory / name)
    config = json.loads((default / "config.json").read_text()) | {
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory
