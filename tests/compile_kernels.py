"""What an engine launches, compiled for a GPU that is not here and never run: a process of its own
for test_compiled_kernels.py. Usage: compile_kernels.py CAPABILITY SHARED_KIB, such as 86 99.

The compiled kernels are what Triton leaves in TRITON_CACHE_DIR. The model, the graphs and the
sampler run as they are, on tensors that have a shape and no content."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from checkpoints import QWEN3_06B
from replaying import fake_capture
from sampling import sampling_inputs
from triton.backends.compiler import GPUTarget

from nanovllm.config import Config
from nanovllm.engine import decode_graphs
from nanovllm.layers.few_rows import one_row_linear
from nanovllm.layers.rank_sum import sum_add_rms_norm
from nanovllm.layers.sampler_kernels import sample_triton
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, use_context
from nanovllm.utils.device import defaults
from nanovllm.utils.hf import ModelConfig
from nanovllm.utils.parallel import Summand

META = torch.device("meta")

# A first layer and a last; those between launch the same.
SHALLOW = replace(QWEN3_06B, num_hidden_layers=2)
# As many query heads for a KV head as any Qwen3 has; sizes that are no powers of two.
ODD = replace(
    SHALLOW,
    hidden_size=1000,
    intermediate_size=1112,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=80,
    attention_bias=True,
    dtype="float16",
)
FLOAT32 = replace(SHALLOW, head_dim=64, dtype="float32")
LARGE_HEADS = replace(FLOAT32, head_dim=256)


def stand_in(capability: int, shared_kib: int) -> None:
    """Let Triton compile for that GPU and launch nothing; let META tensors pass for the GPU's."""
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            utils=SimpleNamespace(
                get_device_properties=lambda device: {
                    "multiprocessor_count": 132,
                    "max_shared_mem": shared_kib << 10,
                }
            ),
        )
    )
    run = triton.runtime.JITFunction.run
    triton.runtime.JITFunction.run = lambda self, *args, **kwargs: run(
        self, *args, **{**kwargs, "warmup": True}
    )
    torch.Tensor.is_cuda = True
    torch.cuda.get_device_capability = lambda device: divmod(capability, 10)


def attention(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(q)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=META)


def prefill(model: Qwen3ForCausalLM) -> torch.Tensor:
    """2048 positions of 16 sequences: their logits."""
    context = Context(is_prefill=True, slot_mapping=zeros(2048), cu_seqlens_q=zeros(17))
    with use_context(context):
        return model.compute_logits(model(zeros(2048), zeros(2048)))


@torch.inference_mode()
def compile_all(config: ModelConfig, block_size: int, batches: list[int], **filters: int) -> None:
    """What the start of an engine launches, with decode graphs for these batches, and a prefill
    whose requests use a filter."""
    dtype = getattr(torch, config.dtype)
    with defaults(META, dtype):
        model = Qwen3ForCausalLM(config, attention)
        cache = torch.empty(8, block_size, config.num_key_value_heads, config.head_dim)
    prefill(model)  # the warm-up, before there is a pool
    for layer in model.model.layers:
        layer.self_attn.attn.k_cache = layer.self_attn.attn.v_cache = cache
    decode_graphs.graph_batch_sizes = lambda max_num_seqs: batches
    limits = Config(model=".", max_model_len=4096, kvcache_block_size=block_size)
    decode_graphs.DecodeGraphs(model, limits, zeros(512))
    sample_triton(prefill(model), sampling_inputs(16, META, **filters))


def compile_long_rows() -> None:
    """One row of Qwen3-32B's products, whose inputs are several tiles."""
    for out_features, in_features, silu in ((5120, 25600, False), (51200, 5120, True)):
        weight = torch.empty(out_features, in_features, dtype=torch.bfloat16, device=META)
        one_row_linear(weight[:1], weight, silu)


def compile_rank_sum(size: int) -> None:
    """A sum of four ranks, and the norm after it."""
    weight = torch.empty(size, dtype=torch.bfloat16, device=META)
    memory = SimpleNamespace(addresses=zeros(5).long(), epochs=zeros(512), rank=1, size=4)
    summand = Summand(torch.empty(3, size, dtype=weight.dtype, device=META), 1 << 13, memory)
    for residual in (None, summand.x):
        sum_add_rms_norm(summand, residual, weight, 1e-6)


if __name__ == "__main__":
    capability, shared_kib = map(int, sys.argv[1:])
    stand_in(capability, shared_kib)
    fake_capture(pytest.MonkeyPatch())
    # One row, and for several all tiles of decode attention.
    compile_all(SHALLOW, 256, [1, 16, 40, 64, 128, 256], top_k=1, top_p=1, min_p=0)
    compile_long_rows()
    compile_rank_sum(5120)
    if capability in (86, 90):
        compile_all(ODD, 16, [3], top_p=1)  # blocks no multiples of attention's inner step
        compile_all(FLOAT32, 256, [3], top_k=1)
        compile_all(LARGE_HEADS, 256, [3], top_k=1)
