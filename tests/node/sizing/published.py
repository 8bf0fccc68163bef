"""Deployments that somebody published, with where: the model's own config.json (its figures), GPUs, and what was used.

Loads are ours where the source names none; they are modest, so that memory decides and not speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from node.sizing.advice import Stage
from node.sizing.config_json import parse
from node.sizing.engine import Load
from node.sizing.hardware import KINDS, Hardware
from node.sizing.shape import ModelShape


def _llama(layers: int, hidden: int, heads: int, width: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 8,
        "intermediate_size": width, "vocab_size": 128256, "max_position_embeddings": 131072,
    }  # fmt: skip


LLAMA_8B = _llama(32, 4096, 32, 14336)
LLAMA_70B = _llama(80, 8192, 64, 28672)
LLAMA_405B = _llama(126, 16384, 128, 53248)
QWEN3_32B = {
    "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 25600, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_235B = {
    "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "max_position_embeddings": 262144,
}  # fmt: skip
QWEN3_CODER_480B = {
    "num_hidden_layers": 62, "hidden_size": 6144, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 8192, "moe_intermediate_size": 2560, "num_experts": 160, "num_experts_per_tok": 8,
    "vocab_size": 151936, "max_position_embeddings": 262144,
}  # fmt: skip
DEEPSEEK_R1 = {
    "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
GPT_OSS_120B = {
    "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088,
    "max_position_embeddings": 131072, "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    title: str
    source: str
    config: dict[str, Any]
    hardware: Hardware
    load: Load
    #: What was published: degree of tensor parallelism, hosts per engine, stage.
    tensor: int
    stage: Stage
    pipeline: int = 1
    precision: str | None = None
    kv: str = "bf16"

    @property
    def model(self) -> ModelShape:
        return parse(self.config, name=self.title, precision=self.precision)


CHAT = Load(requests_s=0.5, prompt=1000, output=300, ttft_s=5.0, between_s=0.2, longest=8192)


def on(gpu: str, **more: Any) -> Hardware:
    return Hardware(gpu=KINDS[gpu], **more)


CASES = (
    Case(
        "Llama 3.1 405B FP8 on 8 x H100", "https://blog.vllm.ai/2024/07/23/llama31.html",
        LLAMA_405B, on("H100"), CHAT, tensor=8, stage=Stage.TENSOR, precision="fp8",
    ),
    Case(
        "Llama 3.1 405B BF16 on one host of 8 x H200", "https://blog.vllm.ai/2024/07/23/llama31.html",
        LLAMA_405B, on("H200"), CHAT, tensor=8, stage=Stage.TENSOR,
    ),
    Case(
        "Llama 3.1 405B BF16 on several hosts of 8 x H100", "https://blog.vllm.ai/2024/07/23/llama31.html",
        LLAMA_405B, on("H100", network_gbit=400), CHAT, tensor=8, pipeline=2, stage=Stage.TENSOR,
    ),
    Case(
        "Qwen3-Coder 480B-A35B BF16 on 8 x H200, 32000 tokens",
        "https://docs.vllm.ai/projects/recipes/en/latest/Qwen/Qwen3-Coder-480B-A35B.html",
        QWEN3_CODER_480B, on("H200"), replace(CHAT, longest=32000), tensor=8, stage=Stage.TENSOR,
    ),
    Case(
        "DeepSeek-R1 FP8 on 8 x H200", "https://docs.vllm.ai/projects/recipes/en/latest/DeepSeek/DeepSeek-V3.html",
        DEEPSEEK_R1, on("H200"), CHAT, tensor=8, stage=Stage.TENSOR,
    ),
    Case(
        "DeepSeek-R1 FP8 on two hosts of 8 x H100",
        "https://www.baseten.co/blog/how-multi-node-inference-works-llms-deepseek-r1/",
        DEEPSEEK_R1, on("H100", network_gbit=400), CHAT, tensor=8, pipeline=2, stage=Stage.TENSOR,
    ),
    Case(
        "gpt-oss-120b MXFP4 on one H100", "https://cookbook.openai.com/articles/gpt-oss/run-vllm",
        GPT_OSS_120B, on("H100"), CHAT, tensor=1, stage=Stage.ONE,
    ),
    Case(
        "gpt-oss-120b MXFP4 on 8 x B200: eight replicas, routed by KV, prompts 64K with 90 % in caches",
        "https://docs.nvidia.com/dynamo/recipes/gpt-oss-120b.md",
        GPT_OSS_120B, on("B200"), Load(requests_s=20, prompt=64_000, output=400, shared=0.9, longest=131_072), tensor=1,
        stage=Stage.CLUSTER, kv="fp8",
    ),
    Case(
        "Qwen3-235B-A22B FP8 on 4 x H100", "https://docs.gpustack.ai/latest/performance-lab/qwen3-235b-a22b/h100/",
        QWEN3_235B, on("H100"), CHAT, tensor=4, stage=Stage.TENSOR, precision="fp8",
    ),
    Case(
        "Qwen3-235B-A22B FP8 on 4 x A100", "https://docs.gpustack.ai/latest/performance-lab/qwen3-235b-a22b/a100",
        QWEN3_235B, on("A100"), CHAT, tensor=4, stage=Stage.TENSOR, precision="fp8",
    ),
    Case(
        "Llama 3 70B AWQ on 4 x A10G, over PCIe",
        "https://codingprotocols.com/blog/vllm-quantization-tensor-parallelism-kubernetes",
        LLAMA_70B, on("A10G", per_host=4, nvlink=False), replace(CHAT, requests_s=0.1), tensor=4, stage=Stage.TENSOR,
        precision="int4",
    ),
    Case(
        "Llama 3.3 70B FP8 on one H100, at most 9000 tokens, 95 % of its memory",
        "https://huggingface.co/cortecs/Llama-3.3-70B-Instruct-FP8-Dynamic/discussions/1",
        LLAMA_70B, on("H100", utilization=0.95), replace(CHAT, requests_s=0.3, longest=9000), tensor=1, stage=Stage.ONE,
        precision="fp8",
    ),
    Case(
        "Llama 3.1 8B FP8 on one RTX 4090", "https://gigagpu.com/rtx-4090-24gb-fp8-llama-deployment/",
        LLAMA_8B, on("RTX4090", per_host=1, nvlink=False), replace(CHAT, requests_s=2), tensor=1, stage=Stage.ONE,
        precision="fp8",
    ),
)  # fmt: skip

#: Counts of weights that the models' makers publish, in billions.
PARAMETERS = {
    "Llama 3.1 8B": (LLAMA_8B, 8.03),
    "Llama 3.1 70B": (LLAMA_70B, 70.6),
    "Llama 3.1 405B": (LLAMA_405B, 405.9),
    "Qwen3-32B": (QWEN3_32B, 32.8),
    "Qwen3-235B-A22B": (QWEN3_235B, 235.1),
    "Qwen3-Coder-480B-A35B": (QWEN3_CODER_480B, 480.2),
    "DeepSeek-R1": (DEEPSEEK_R1, 671.0),
    "gpt-oss-120b": (GPT_OSS_120B, 116.8),
}

#: Highest throughput that GPUStack's lab measured with vLLM: model, precision, GPU, tensor parallelism, prompt, output,
#: tokens per second (prompt and output together, of one engine). The pages: docs.gpustack.ai, performance-lab,
#: gpt-oss-120b/h100 (vLLM 0.10.2), qwen3-235b-a22b/h100 and /a100.
MEASURED = (
    (GPT_OSS_120B, None, "H100", 2, 2000, 100, 34083.0),
    (GPT_OSS_120B, None, "H100", 2, 4000, 200, 34491.0),
    (GPT_OSS_120B, None, "H100", 2, 32000, 100, 32471.0),
    (QWEN3_235B, "fp8", "H100", 4, 2000, 100, 18950.0),
    (QWEN3_235B, "fp8", "H100", 4, 4000, 200, 16479.0),
    (QWEN3_235B, "fp8", "H100", 4, 32000, 100, 15366.0),
    (QWEN3_235B, "fp8", "A100", 4, 2000, 100, 5334.0),
    (QWEN3_235B, "fp8", "A100", 4, 4000, 200, 4633.0),
    (QWEN3_235B, "fp8", "A100", 4, 32000, 100, 4133.0),
)
