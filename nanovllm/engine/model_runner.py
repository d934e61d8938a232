"""ModelRunner: one rank's model, KV pool and execution. It runs what the scheduler chose."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.cuda_graphs import CudaGraphs
from nanovllm.engine.inputs import StepInputs, decode_inputs, prefill_inputs, sampling_inputs
from nanovllm.engine.kv_cache import (
    allocate_kv_cache,
    check_pool,
    kv_block_bytes,
    measure_num_blocks,
)
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.attention import select_attention, torch_attention
from nanovllm.layers.sampler import sample, top_logprobs
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import use_context
from nanovllm.utils.hf import ModelConfig
from nanovllm.utils.loader import load_weights
from nanovllm.utils.parallel import TensorParallel

logger = logging.getLogger(__name__)


class ModelRunner:
    """Start-up, in this order: device, model, weights, warm-up at the largest prefill shape, KV
    pool, CUDA graphs. `num_kvcache_blocks` is then the size of the pool.

    `logprobs` holds, for each row of the latest run, {id: log-probability} or None.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        eos_token_ids: frozenset[int],
        tp: TensorParallel = TensorParallel(),
    ) -> None:
        """config.max_model_len must be cut to the model's already; eos_token_ids are held back by
        `min_tokens`. Raises ValueError for a checkpoint that does not match, a missing device, or
        too little memory."""
        self.config = config
        self.eos_token_ids = eos_token_ids.intersection(range(model_config.vocab_size))
        self.logprobs: list[dict[int, float] | None] = []
        self.num_graph_replays = self.num_graph_misses = 0
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
        uses_torch = attention is torch_attention  # which cannot be captured
        if self.device.type == "cuda" and not config.enforce_eager and not uses_torch:
            self.graphs = self._capture_graphs()
        if tp.rank == 0:
            logger.info(
                "%s attention, %s on %s, CUDA graphs %s, %d KV blocks (%d tokens), world size %d",
                "plain torch" if uses_torch else "flash-attn",
                self.dtype,
                self.device,
                "on" if self.graphs else "off",
                self.num_kvcache_blocks,
                self.num_kvcache_blocks * self.block_size,
                tp.size,
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
        wanted = [i for i, s in enumerate(seqs) if s.sampling_params.logprobs is not None]
        raw_logits = logits[wanted] if wanted else None  # a copy, from before any id is banned
        sampling = sampling_inputs(seqs, self.eos_token_ids, logits.shape[1], self.device)
        token_ids = sample(logits, sampling)
        self.logprobs = [None] * len(seqs)
        if wanted:
            counts = [seqs[i].sampling_params.logprobs for i in wanted]
            for i, result in zip(
                wanted, top_logprobs(raw_logits, token_ids[wanted], counts), strict=True
            ):
                self.logprobs[i] = result
        return token_ids.tolist()

    @torch.inference_mode()
    def run_model(self, inputs: StepInputs) -> torch.Tensor | None:
        """[N, vocab_size] logits of the last positions on rank 0, None elsewhere."""
        context = inputs.context
        with use_context(context):
            if self.graphs and not context.is_prefill and self.graphs.fits(len(inputs.input_ids)):
                hidden = self.graphs.run(inputs)
                self.num_graph_replays += 1
            else:
                hidden = self.model(inputs.input_ids, inputs.positions)
                self.num_graph_misses += not context.is_prefill
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
