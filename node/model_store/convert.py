"""Turns a GGUF file into a bf16 checkpoint directory. Runs as a process of its own, so that its memory goes back.

Usage: `convert.py GGUF OUTPUT_DIRECTORY`
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, output: Path) -> None:
    """Write weights, configuration, tokenizer and chat template of `gguf` to `output`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(str(output))
    tokenizer.save_pretrained(str(output))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
