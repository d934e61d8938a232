"""PrefillGraphs: short prefills as CUDA graphs, one per bucket of positions.

A prefill of a few hundred positions takes the GPU a millisecond or two, and the host 15 to launch
kernel by kernel. One that takes the GPU longer would only lose by being rounded up to a bucket.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch

from nanovllm.config import Config
from nanovllm.engine.decode_graphs import capture
from nanovllm.engine.inputs import fill_sampling, prefill_arrays
from nanovllm.engine.packed import PackedBuffer
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import SamplingInputs
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, use_context

MAX_SEQS = 32
SIZES = (32, 64, 128, 256, 512, 1024, 2048, 3072, 4096)
MAX_WORK = 4e12  # positions x parameters: about 11 ms of a GPU of 700 TFLOP/s


def prefill_sizes(num_params: int, budget: int) -> list[int]:
    """The buckets for a model of so many parameters and steps of at most `budget` positions."""
    return [size for size in SIZES if size <= budget and size * num_params <= MAX_WORK]


class PrefillGraphs:
    """Graphs for prefills without history of up to MAX_SEQS sequences, in buckets of positions.

    The positions beyond those of the sequences are one more sequence, of id 0, with slots -1 and
    read by nobody. They must belong to one: attention loads whole tiles of K and V, past the end
    of a sequence too, and multiplies those rows by 0. Memory that nobody has written may hold NaN,
    and 0 * NaN is NaN. Sequences that are not there have length 0.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        config: Config,
        sampled: torch.Tensor,
        pool: tuple[int, int] | None,
        record: Callable[..., dict[int, torch.cuda.CUDAGraph]] = capture,
    ) -> None:
        """sampled: int32 [max_num_seqs], as in DecodeGraphs, whose memory `pool` is shared, and
        whose `record` this is."""
        self.model = model
        self.sampled = sampled
        self.max_seqs = min(MAX_SEQS, config.max_num_seqs)
        num_params = sum(param.numel() for param in model.parameters())
        self.sizes = prefill_sizes(num_params, config.max_num_batched_tokens)
        positions, rows = (max(self.sizes, default=1),), (self.max_seqs,)
        self.inputs = PackedBuffer(
            {
                "seeds": (torch.int64, rows),
                "input_ids": (torch.int32, positions),
                "positions": (torch.int32, positions),
                "slot_mapping": (torch.int32, positions),
                "cu_seqlens": (torch.int32, (self.max_seqs + 2,)),
                "lens": (torch.int32, rows),
                "temperatures": (torch.float32, rows),
            },
            sampled.device,
        )
        self.inputs["slot_mapping"].fill_(-1)  # what is captured must store nothing
        self.hidden: torch.Tensor | None = None
        self.graphs = record(self._step, self.sizes, pool)

    def _step(self, size: int) -> None:
        """What a graph holds: from the inputs to the sampled ids."""
        from nanovllm.layers.sampler_kernels import sample_triton

        inputs = self.inputs
        context = Context(
            is_prefill=True,
            slot_mapping=inputs["slot_mapping"][:size],
            cu_seqlens_q=inputs["cu_seqlens"],
            cu_seqlens_k=inputs["cu_seqlens"],
            max_seqlen_q=size,
            max_seqlen_k=size,
        )
        with use_context(context):
            hidden = self.model(inputs["input_ids"][:size], inputs["positions"][:size])
        # One row is too many: the padding may stand behind max_seqs sequences. Rows that belong to
        # no sequence are of the last position, and nobody reads them.
        hidden = hidden[: self.max_seqs]
        if self.hidden is None:
            self.hidden = torch.empty_like(hidden)
        self.hidden.copy_(hidden)
        logits = self.model.compute_logits(hidden)
        if logits is not None:
            sampling = SamplingInputs(
                temperatures=inputs["temperatures"],
                seeds=inputs["seeds"],
                positions=inputs["lens"],
            )
            self.sampled[: self.max_seqs] = sample_triton(logits, sampling)
        self.model.tp.broadcast(self.sampled[: self.max_seqs])

    def fits(self, seqs: list[Sequence]) -> bool:
        return (
            len(seqs) <= self.max_seqs
            and not any(seq.num_cached_tokens for seq in seqs)
            and sum(seq.num_scheduled_tokens for seq in seqs) <= max(self.sizes, default=0)
        )

    def launch(self, seqs: list[Sequence]) -> torch.Tensor:
        """Start a prefill that `fits`. Sampled ids come in `sampled`; returns the hidden states of
        the last positions [N, hidden], valid until the next launch."""
        ids, positions, slots, cu_seqlens, _ = prefill_arrays(seqs)
        host, n = self.inputs.host(), len(seqs)
        size = self.sizes[bisect_left(self.sizes, len(ids))]
        fill_sampling(host, seqs)
        for name, array, rest in (
            ("input_ids", ids, 0),
            ("positions", positions, 0),
            ("slot_mapping", slots, -1),
            ("cu_seqlens", cu_seqlens, size),
        ):
            host[name][: len(array)] = array
            host[name][len(array) :] = rest
        host["lens"][:n] = [len(seq) for seq in seqs]
        self.inputs.upload()
        self.graphs[size].replay()
        return self.hidden[:n]
