"""ModelRunner: one rank's model, KV pool and execution. It runs what the scheduler chose."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.decode_graphs import DecodeGraphs, capture, rehearse
from nanovllm.engine.inputs import (
    StepInputs,
    decode_inputs,
    prefill_inputs,
    sampling_inputs,
    take_pending,
)
from nanovllm.engine.kv_cache import (
    allocate_kv_cache,
    check_pool,
    kv_block_bytes,
    measure_num_blocks,
)
from nanovllm.engine.prefill_graphs import PrefillGraphs
from nanovllm.engine.sequence import Sequence
from nanovllm.layers import kernels
from nanovllm.layers.attention import select_attention, torch_attention
from nanovllm.layers.sampler import sample, top_logprobs
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams
from nanovllm.utils.context import use_context
from nanovllm.utils.device import defaults, resolve_device, resolve_dtype
from nanovllm.utils.hf import ModelConfig
from nanovllm.utils.loader import load_weights
from nanovllm.utils.parallel import TensorParallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way: token_ids [N] int32 on the host are valid once `arrived` (None on CPU)
    has happened. logprobs: seq_id -> {id: log-probability}, of those who asked for them."""

    token_ids: torch.Tensor
    arrived: torch.cuda.Event | None
    logprobs: dict[int, dict[int, float]]


class ModelRunner:
    """Start-up, in this order: device, model, weights, kernels, warm-up at the largest prefill
    shape, KV pool, CUDA graphs. `num_kvcache_blocks` is then the size of the pool.

    A step is launched and collected; `run` does both.
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
        self.tp = tp
        self.eos_token_ids = eos_token_ids.intersection(range(model_config.vocab_size))
        self.logprobs: dict[int, dict[int, float]] = {}  # of the latest `run`
        self._latest_decode: LaunchedStep | None = None  # by a graph
        self._rows: dict[int, int] = {}  # seq_id -> row in the step launched last
        self.num_graph_replays = self.num_graph_misses = 0
        self.device = resolve_device(config.device, tp.rank, tp.size)
        self.dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        self.block_size = config.kvcache_block_size
        self.graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        attention = select_attention(
            self.device, self.dtype, model_config.head_dim, self.block_size
        )
        try:
            with defaults(self.device, self.dtype):
                self.model = Qwen3ForCausalLM(model_config, attention, tp)
        except RuntimeError as error:  # out of memory, or a size that overflows the allocator
            raise ValueError(
                f"{config.model}: no memory for the model of config.json: {error}"
            ) from error
        load_weights(self.model, config.model)
        # The ids that the step launched last has sampled, by row.
        self.sampled = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=self.device)
        has_graphs = kernels.usable(self.sampled) and not config.enforce_eager
        # Plain torch attention reads lengths on the host: no graph of a prefill can hold it.
        with_prefill = attention is not torch_attention
        try:
            if self.device.type == "cuda":
                if kernels.usable(self.sampled):
                    self._compile_ahead(has_graphs, with_prefill)
                self._warm_up(SamplingParams(logprobs=MAX_LOGPROBS))
            self.num_kvcache_blocks = self._num_blocks()
            self.kv_cache = allocate_kv_cache(self.model, self.num_kvcache_blocks, self.block_size)
            if has_graphs:
                self._capture_graphs(with_prefill)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no GPU memory for steps of max_num_batched_tokens={config.max_num_batched_tokens}"
                f" or max_num_seqs={config.max_num_seqs} beside the model and a pool of "
                f"gpu_memory_utilization={config.gpu_memory_utilization}: lower one ({error})"
            ) from error
        if tp.rank == 0:
            logger.info(
                f"{attention.__name__}, {self.dtype} on {self.device}, CUDA graphs "
                f"{'on' if self.graphs else 'off'}, {self.num_kvcache_blocks} KV blocks "
                f"({self.num_kvcache_blocks * self.block_size} tokens), world size {tp.size}"
            )

    def call(self, method: str, *args: Any) -> Any:
        """Run one of this runner's methods by name, on every rank; rank 0's result."""
        return getattr(self, method)(*args)

    def check(self) -> None:
        """Nothing; by `call` it raises RuntimeError if another rank has failed."""

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        """Compute the scheduled positions of `seqs`: their K/V go to the pool, and one token is
        sampled from each one's last position. Changes no sequence."""
        step = self.launch(seqs, is_prefill)
        self.logprobs = step.logprobs
        return self.collect(step)

    @torch.inference_mode()
    def launch(
        self, seqs: list[Sequence], is_prefill: bool, resample: bool | None = None
    ) -> LaunchedStep | None:
        """Start what `run` does without waiting for it. A sequence in decode whose last token is
        PENDING must have been in the step launched just before.

        Ranks above 0 get mirrors (engine/control.py) instead of sequences, and whether the tokens
        that a graph samples are to be sampled again (`resample`); they return None.
        """
        if resample is None:
            resample = needs_more_than_the_graph(seqs)
        hidden = self._replay(seqs, is_prefill)
        logprobs: dict[int, dict[int, float]] = {}
        if hidden is not None:
            if resample:
                # The LM head again, since a graph that kept its logits would cost GiBs in all.
                logprobs = self._sample(self.model.compute_logits(hidden), seqs)
                if not is_prefill:
                    self.graphs.override(self.sampled[: len(seqs)])
        else:
            inputs = (prefill_inputs if is_prefill else decode_inputs)(seqs, self.device)
            if not is_prefill:
                take_pending(inputs.input_ids, seqs, self.sampled, self._rows)
            logprobs = self._sample(self.run_model(inputs), seqs)
        self._rows = {seq.seq_id: row for row, seq in enumerate(seqs)}
        if self.tp.rank > 0:
            return None
        is_cuda, arrived = self.device.type == "cuda", None
        host = torch.empty(len(seqs), dtype=torch.int32, pin_memory=is_cuda)
        host.copy_(self.sampled[: len(seqs)], non_blocking=True)
        if is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        step = LaunchedStep(host, arrived, logprobs)
        if hidden is not None and not is_prefill:
            self._latest_decode = step
        return step

    def collect(self, step: LaunchedStep) -> list[int]:
        """Wait for a launched step: the sampled ids, in the order of its sequences."""
        if step.arrived is not None:
            step.arrived.synchronize()
        token_ids = step.token_ids.tolist()
        if self.graphs is not None and step is self._latest_decode:
            self.graphs.arrived(token_ids)
        return token_ids

    @torch.inference_mode()
    def run_model(self, inputs: StepInputs) -> torch.Tensor | None:
        """[N, vocab_size] logits of the last positions on rank 0, None elsewhere. No graph."""
        with use_context(inputs.context):
            hidden = self.model(inputs.input_ids, inputs.positions)
        return self.model.compute_logits(hidden)

    def _replay(self, seqs: list[Sequence], is_prefill: bool) -> torch.Tensor | None:
        """Start the step by a CUDA graph: the hidden states [N, hidden]. None if none holds it."""
        if is_prefill:
            if self.graphs is not None:
                self.graphs.forget()
            if self.prefill_graphs is None or not self.prefill_graphs.fits(seqs):
                return None
            return self.prefill_graphs.launch(seqs)
        if self.graphs is None or not self.graphs.fits(len(seqs)):
            self.num_graph_misses += 1
            return None
        self.num_graph_replays += 1
        return self.graphs.launch(seqs, self._rows)

    def _sample(
        self, logits: torch.Tensor | None, seqs: list[Sequence]
    ) -> dict[int, dict[int, float]]:
        """Rank 0, which alone has logits, samples; `sampled` is filled on every rank. Returns the
        log-probabilities of those who want them, as in LaunchedStep."""
        results: dict[int, dict[int, float]] = {}
        sampled = self.sampled[: len(seqs)]
        if logits is not None:
            wanted = [i for i, s in enumerate(seqs) if s.sampling_params.logprobs is not None]
            raw_logits = logits[wanted] if wanted else None  # a copy, from before any id is banned
            inputs = sampling_inputs(seqs, self.eos_token_ids, logits.shape[1], self.device)
            sampled[:] = sample(logits, inputs)
            if wanted:
                counts = [seqs[i].sampling_params.logprobs for i in wanted]
                found = top_logprobs(raw_logits, sampled[wanted], counts)
                results = dict(zip((seqs[i].seq_id for i in wanted), found, strict=True))
        self.tp.broadcast(sampled)
        return results

    @torch.inference_mode()
    def _compile_ahead(self, has_graphs: bool, with_prefill: bool) -> None:
        """Compile all kernels of warm-up and graphs, by going through both in two layers, a first
        and a last (those between launch the same), with a pool of one block. Leaves everything as
        it was."""
        from nanovllm.layers.compile_ahead import compile_ahead

        def start() -> None:
            self._warm_up(SamplingParams())  # a sampler that is not launched gives no ids
            if has_graphs:
                allocate_kv_cache(self.model, 1, self.block_size)
                self._capture_graphs(with_prefill, rehearse)

        layers = self.model.model.layers
        no_pool = layers[0].self_attn.attn.k_cache
        self.model.model.layers = layers[:2]
        try:
            compile_ahead(start)
        finally:
            self.model.model.layers = layers
        for layer in layers[:2]:
            layer.self_attn.attn.k_cache = layer.self_attn.attn.v_cache = no_pool
        self.graphs = self.prefill_graphs = None
        self.sampled.zero_()

    @torch.inference_mode()
    def _warm_up(self, params: SamplingParams) -> None:
        """Reach the peak of memory: the largest prefill, then the largest batch of logits, sampled
        with `params`."""
        torch.cuda.reset_peak_memory_stats(self.device)
        budget, longest = self.config.max_num_batched_tokens, self.config.max_model_len
        starts = range(0, budget, longest)[: self.config.max_num_seqs]
        lengths = [min(longest, budget - start) for start in starts]
        for lens in (lengths, [1] * self.config.max_num_seqs):
            seqs = [Sequence([0] * length, params, self.block_size) for length in lens]
            for seq in seqs:
                seq.num_scheduled_tokens = len(seq)
                seq.block_table = [0] * seq.num_blocks  # never read: there is no pool yet
            self.launch(seqs, is_prefill=True)

    def _num_blocks(self) -> int:
        if self.config.num_kvcache_blocks is not None:
            return self.config.num_kvcache_blocks
        block_bytes = kv_block_bytes(self.model, self.block_size)
        utilization = self.config.gpu_memory_utilization
        num_blocks = self.tp.all_reduce_min(
            measure_num_blocks(self.device, utilization, block_bytes)
        )
        check_pool(num_blocks, self.block_size, self.config.max_model_len)
        return num_blocks

    @torch.inference_mode()
    def _capture_graphs(self, with_prefill: bool, record: Callable[..., dict] = capture) -> None:
        self.graphs = DecodeGraphs(self.model, self.config, self.sampled, record)
        if with_prefill:
            self.prefill_graphs = PrefillGraphs(
                self.model, self.config, self.sampled, self.graphs.pool(), record
            )

    def exit(self) -> None:
        """Let go of the model, the pool and the graphs, and give their memory back."""
        self.graphs = self.prefill_graphs = None  # before the pool whose addresses they hold
        self.model = self.kv_cache = self.sampled = None
        gc.collect()
        if self.device.type == "cuda":
            # Not the whole device: what frees it from a lost rank goes on in a stream of its own.
            torch.cuda.current_stream(self.device).synchronize()
        if self.tp.group is not None:
            self.tp.group.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def needs_more_than_the_graph(seqs: list[Sequence]) -> bool:
    """A graph samples with a temperature; filters, bans and reports come after it."""
    return any(
        params.top_k > 0
        or params.top_p < 1
        or params.min_p > 0
        or params.logprobs is not None
        or seq.num_completion_tokens < params.min_tokens
        for seq, params in ((seq, seq.sampling_params) for seq in seqs)
    )
