"""DecodeGraphs: a decode step from ids to sampled ids as one CUDA graph per batch-size bucket.

The batch lives on the GPU. A step samples the ids that are the next step's input and moves the
context lengths on, all inside the graph: while the same sequences go on, a step needs nothing from
the host. When they change, or one gets a new block, the whole batch is described again, in one
copy from one pinned buffer; the rows of pending tokens, where there are any, follow in another.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch

from nanovllm.config import Config
from nanovllm.engine.inputs import fill_sampling, take_pending
from nanovllm.engine.packed import PackedBuffer
from nanovllm.engine.sequence import PENDING, Sequence
from nanovllm.layers.sampler import SamplingInputs
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, use_context

MAX_GRAPH_BATCH = 512


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 16, and the largest batch itself, so that no decode batch up to
    min(max_num_seqs, 512) is without a graph."""
    limit = min(max_num_seqs, MAX_GRAPH_BATCH)
    sizes = {1, 2, 4, 8, *range(16, limit + 1, 16), limit}
    return sorted(size for size in sizes if size <= limit)


def capture(
    step: Callable[[int], None], sizes: list[int], pool: tuple[int, int] | None = None
) -> dict[int, torch.cuda.CUDAGraph]:
    """Record step(size) for each of the ascending `sizes`, all in one memory pool: the largest
    first, since its activations set the size of the pool and the others fit inside."""
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    for size in reversed(sizes):
        step(size)  # compiles the kernels
        torch.cuda.synchronize()
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size], pool):
            step(size)
        pool = pool or graphs[size].pool()
    return graphs


def rehearse(step: Callable[[int], None], sizes: list[int], pool: None = None) -> dict:
    """In place of `capture`: run what it would record, in the same order, and record nothing."""
    for size in reversed(sizes):
        step(size)
    return {}


class DecodeGraphs:
    """The batch state and one graph per bucket, all in one memory pool.

    A batch runs in the smallest bucket that holds it; the rows beyond it get slot -1 (nothing is
    stored) and context length 0 (nothing is read).
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        config: Config,
        sampled: torch.Tensor,
        record: Callable[..., dict[int, torch.cuda.CUDAGraph]] = capture,
    ) -> None:
        """sampled: int32 [max_num_seqs], into which every step, also one without a graph, writes
        the ids that it sampled. Captures all graphs; with `record=rehearse`, none."""
        self.model = model
        self.block_size = config.kvcache_block_size
        self.sampled = sampled
        self.sizes = graph_batch_sizes(config.max_num_seqs)
        rows = self.sizes[-1]
        max_num_blocks = -(-config.max_model_len // self.block_size)
        self.state = PackedBuffer(
            {
                "seeds": (torch.int64, (rows,)),
                "input_ids": (torch.int32, (rows,)),
                # Of the context, the position to be computed included; 0 for padding rows.
                "context_lens": (torch.int32, (rows,)),
                "temperatures": (torch.float32, (rows,)),
                "block_tables": (torch.int32, (rows, max_num_blocks)),
            },
            sampled.device,
        )
        # What the state on the device describes: of each row seq_id, length, block table and last
        # token (PENDING: not on the host yet).
        self._rows: list[tuple[int, int, list[int], int]] = []
        # The hidden states of the step launched last, for whoever samples in another way.
        self.hidden: torch.Tensor | None = None
        self.graphs = record(self._step, self.sizes)

    def _step(self, size: int) -> None:
        """What a graph holds: from the state to the sampled ids and the next state."""
        from nanovllm.layers.decode_kernels import positions_and_slots
        from nanovllm.layers.sampler_kernels import sample_triton

        state = self.state
        input_ids, context_lens = state["input_ids"][:size], state["context_lens"][:size]
        tables = state["block_tables"][:size]
        positions, slot_mapping = positions_and_slots(context_lens, tables, self.block_size)
        context = Context(
            is_prefill=False,
            slot_mapping=slot_mapping,
            context_lens=context_lens,
            block_tables=tables,
        )
        with use_context(context):
            hidden = self.model(input_ids, positions)
        logits = self.model.compute_logits(hidden)
        if self.hidden is None:
            self.hidden = torch.empty_like(hidden)  # on the first call, of the largest size
        self.hidden[:size] = hidden
        if logits is not None:
            inputs = SamplingInputs(
                temperatures=state["temperatures"][:size],
                seeds=state["seeds"][:size],
                positions=context_lens,  # of the token to be sampled: one past the one computed
            )
            self.sampled[:size] = sample_triton(logits, inputs, (input_ids, context_lens))
        self.model.tp.broadcast(self.sampled[:size])
        if logits is None:  # not rank 0: what the sampler does beside
            input_ids.copy_(self.sampled[:size])
            context_lens += context_lens > 0

    def fits(self, batch_size: int) -> bool:
        return batch_size <= self.sizes[-1]

    def pool(self) -> tuple[int, int] | None:
        """The memory pool of the graphs, for torch.cuda.graph; None without graphs."""
        return self.graphs[self.sizes[-1]].pool() if self.graphs else None

    def launch(self, seqs: list[Sequence], rows_before: dict[int, int]) -> torch.Tensor:
        """Start a decode step of `seqs`, at most the largest bucket. Their sampled ids come in
        `sampled`. Returns the hidden states [N, hidden], valid until the next launch.

        rows_before: seq_id -> row in the step launched last. A sequence whose last token is
        pending takes it from there, on the device.
        """
        # Lengths and tables too: a sequence may have been preempted and prefilled again since. And
        # ids: a caller of `step`'s parts may have accepted others than were sampled; ranks above 0
        # take those that they are told.
        rows = [(seq.seq_id, len(seq), seq.block_table, seq.last_token) for seq in seqs]
        if rows != self._rows:
            self._upload(seqs)
            take_pending(self.state["input_ids"][: len(seqs)], seqs, self.sampled, rows_before)
            self._rows = [(i, n, list(table), token) for i, n, table, token in rows]
        self._rows = [(i, n + 1, table, PENDING) for i, n, table, _ in self._rows]
        self.graphs[self.sizes[bisect_left(self.sizes, len(seqs))]].replay()
        return self.hidden[: len(seqs)]

    def _upload(self, seqs: list[Sequence]) -> None:
        host, n = self.state.host(), len(seqs)
        fill_sampling(host, seqs)
        host["input_ids"][:n] = [seq.last_token for seq in seqs]
        host["context_lens"][:n] = [len(seq) for seq in seqs]
        # Padding rows are computed too, so they need an id that exists.
        host["input_ids"][n:] = host["context_lens"][n:] = 0
        for row, seq in zip(host["block_tables"], seqs, strict=False):
            row[: len(seq.block_table)] = seq.block_table
        self.state.upload()

    def forget(self) -> None:
        """Describe the next batch anew: the sequences of a step that failed, prefilled again, may
        come back in the same blocks with other ids than the device has."""
        self._rows = []

    def arrived(self, token_ids: list[int]) -> None:
        """The ids that the step launched last has sampled are known on the host."""
        if self._rows:
            pairs = zip(self._rows, token_ids, strict=True)
            self._rows = [(*row[:3], token_id) for row, token_id in pairs]

    def override(self, token_ids: torch.Tensor) -> None:
        """Make token_ids [N], instead of what the graph sampled, the rows' next input."""
        self.state["input_ids"][: len(token_ids)] = token_ids
