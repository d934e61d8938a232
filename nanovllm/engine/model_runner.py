"""ModelRunner: one rank's model, KV pool and execution. It runs what the scheduler chose."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.cuda_graphs import CudaGraphs
from nanovllm.engine.inputs import StepInputs, decode_inputs, prefill_inputs, temperatures
from nanovllm.engine.kv_cache import (
    allocate_kv_cache,
    check_pool,
    kv_block_bytes,
    measure_num_blocks,
)
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.attention import select_attention, torch_attention
from nanovllm.layers.sampler import Sampler
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import use_context
from nanovllm.utils.hf import ModelConfig
from nanovllm.utils.loader import load_weights
from nanovllm.utils.parallel import TensorParallel

logger = logging.getLogger(__name__)


class ModelRunner:
    """Start-up, in this order: device, model, weights, sampler, warm-up at the largest prefill
    shape, KV pool, CUDA graphs. `num_kvcache_blocks` is then the size of the pool.
    """

    def __init__(
        self, config: Config, model_config: ModelConfig, tp: TensorParallel = TensorParallel()
    ) -> None:
        """config.max_model_len must be cut to the model's already. Raises ValueError for a
        checkpoint that does not match, a missing device, or too little memory."""
        self.config = config
        self.device = _resolve_device(config.device, tp.rank)
        self.dtype = _resolve_dtype(config.dtype, model_config.dtype, self.device)
        self.block_size = config.kvcache_block_size
        self.graphs: CudaGraphs | None = None
        attention = select_attention(
            self.device, self.dtype, model_config.head_dim, self.block_size
        )
        with _defaults(self.device, self.dtype):
            self.model = Qwen3ForCausalLM(model_config, attention, tp)
        load_weights(self.model, config.model)
        self.sampler = Sampler()
        if self.device.type == "cuda":
            self._warm_up()
        num_kv_heads = self.model.model.layers[0].self_attn.qkv_proj.num_kv_heads
        self.num_kvcache_blocks = self._num_blocks(model_config, num_kv_heads)
        self.kv_cache = allocate_kv_cache(
            self.model,
            model_config,
            num_kv_heads,
            self.num_kvcache_blocks,
            self.block_size,
            self.dtype,
            self.device,
        )
        if self.device.type == "cuda" and not config.enforce_eager:
            if attention is torch_attention:
                logger.warning("CUDA graphs: off, since plain torch attention cannot be captured")
            else:
                self.graphs = self._capture_graphs()
        logger.info(
            "%s, %s, %d KV blocks of %d positions, CUDA graphs %s",
            self.device,
            self.dtype,
            self.num_kvcache_blocks,
            self.block_size,
            "on" if self.graphs else "off",
        )

    def call(self, method: str, *args: Any) -> Any:
        """Run one of this runner's methods by name, on every rank; rank 0's result."""
        return getattr(self, method)(*args)

    @torch.inference_mode()
    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        """Compute the scheduled positions of `seqs`: their K/V go to the pool, and one token is
        sampled from each one's last position. Changes no sequence."""
        inputs = (prefill_inputs if is_prefill else decode_inputs)(seqs, self.device)
        logits = self.run_model(inputs)
        return self.sampler(logits, temperatures(seqs, self.device)).tolist()

    @torch.inference_mode()
    def run_model(self, inputs: StepInputs) -> torch.Tensor | None:
        """[N, vocab_size] logits of the last positions on rank 0, None elsewhere."""
        context = inputs.context
        with use_context(context):
            if self.graphs and not context.is_prefill and self.graphs.fits(len(inputs.input_ids)):
                hidden = self.graphs.run(inputs)
            else:
                hidden = self.model(inputs.input_ids, inputs.positions)
            return self.model.compute_logits(hidden)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Reach the peak of memory: the largest prefill, then the largest batch of logits."""
        torch.cuda.reset_peak_memory_stats(self.device)
        config = self.config
        length = min(config.max_num_batched_tokens, config.max_model_len)
        count = max(min(config.max_num_batched_tokens // length, config.max_num_seqs), 1)
        seqs = [Sequence([0] * length, block_size=self.block_size) for _ in range(count)]
        for seq in seqs:
            seq.num_scheduled_tokens = length
            seq.block_table = [0] * seq.num_blocks  # never read: there is no pool yet
        self.run(seqs, is_prefill=True)
        rows = [Sequence([0], block_size=self.block_size) for _ in range(config.max_num_seqs)]
        for seq in rows:
            seq.num_scheduled_tokens = 1
            seq.block_table = [0]
        self.run(rows, is_prefill=True)

    def _num_blocks(self, model_config: ModelConfig, num_kv_heads: int) -> int:
        if self.config.num_kvcache_blocks is not None:
            return self.config.num_kvcache_blocks
        block_bytes = kv_block_bytes(model_config, num_kv_heads, self.block_size, self.dtype)
        num_blocks = measure_num_blocks(
            self.device, self.config.gpu_memory_utilization, block_bytes
        )
        check_pool(num_blocks, self.block_size, self.config.max_model_len)
        return num_blocks

    @torch.inference_mode()
    def _capture_graphs(self) -> CudaGraphs:
        max_num_blocks = -(-self.config.max_model_len // self.block_size)
        return CudaGraphs(self.model, self.config.max_num_seqs, max_num_blocks, self.device)

    def exit(self) -> None:
        """Let go of the model, the pool and the graphs, and give their memory back."""
        self.graphs = None  # before the pool whose addresses they hold
        self.model = self.kv_cache = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def _resolve_device(name: str, rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU: use device='cpu' or 'auto'")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _resolve_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # CPUs are slow or inexact in half precision, and float32 is what results are checked in.
        name = checkpoint if device.type == "cuda" else "float32"
    return getattr(torch, name)


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """New tensors are made on `device` in `dtype` inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
