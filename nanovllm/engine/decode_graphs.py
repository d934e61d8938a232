"""DecodeGraphs: a decode step from ids to sampled ids as one CUDA graph per batch-size bucket.

The batch lives on the GPU. A step samples the ids that are the next step's input and moves the
context lengths on, all inside the graph: while the same sequences go on, a step needs nothing from
the host. When they change, or one gets a new block, the whole batch is described again, in one
copy from one pinned buffer.
"""

from bisect import bisect_left

import torch

from nanovllm.engine.inputs import fill_sampling
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


class DecodeGraphs:
    """The batch state and one graph per bucket, all in one memory pool.

    A batch runs in the smallest bucket that holds it; the rows beyond it get slot -1 (nothing is
    stored) and context length 0 (nothing is read).
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        max_num_seqs: int,
        max_num_blocks: int,
        block_size: int,
        sampled: torch.Tensor,
    ) -> None:
        """max_num_blocks: the width of a block table at max_model_len; sampled: int32
        [max_num_seqs], into which every step, also one without a graph, writes the ids that it
        sampled. Captures all graphs."""
        self.model = model
        self.block_size = block_size
        self.sampled = sampled
        self.sizes = graph_batch_sizes(max_num_seqs)
        rows = self.sizes[-1]
        self.state = PackedBuffer(
            {
                "seeds": (torch.int64, (rows,)),
                "input_ids": (torch.int32, (rows,)),
                "sources": (torch.int32, (rows,)),  # see launch
                # Of the context, the position to be computed included; 0 for padding rows.
                "context_lens": (torch.int32, (rows,)),
                "temperatures": (torch.float32, (rows,)),
                "block_tables": (torch.int32, (rows, max_num_blocks)),
            },
            sampled.device,
        )
        # What the state on the device describes: seq_ids, their lengths and block tables.
        self._seq_ids: list[int] = []
        self._lens: list[int] = []
        self._token_ids: list[int] = []  # PENDING: not on the host yet
        self._tables: list[list[int]] = []
        # The hidden states of the step launched last, for whoever samples in another way.
        self.hidden: torch.Tensor | None = None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # Largest first: its activations set the size of the pool, the others fit inside.
        for size in reversed(self.sizes):
            self._capture(size)

    def _capture(self, size: int) -> None:
        self._step(size)  # compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = self.pool() if self.graphs else None
        with torch.cuda.graph(graph, pool):
            self._step(size)
        self.graphs[size] = graph

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

    def pool(self) -> tuple[int, int]:
        """The memory pool of the graphs, for torch.cuda.graph."""
        return self.graphs[self.sizes[-1]].pool()

    def launch(self, seqs: list[Sequence], rows_before: dict[int, int]) -> torch.Tensor:
        """Start a decode step of `seqs`, at most the largest bucket. Their sampled ids come in
        `sampled`. Returns the hidden states [N, hidden], valid until the next launch.

        rows_before: seq_id -> row in the step launched last. A sequence whose last token is
        pending takes it from there, on the device.
        """
        size = self.sizes[bisect_left(self.sizes, len(seqs))]
        if not self._continues(seqs):
            sources = [rows_before[s.seq_id] if s.last_token == PENDING else -1 for s in seqs]
            self._upload(seqs, sources)
            source, ids = self.state["sources"][: len(seqs)], self.state["input_ids"][: len(seqs)]
            torch.where(source >= 0, self.sampled[source.clamp_min(0)], ids, out=ids)
            self._seq_ids = [seq.seq_id for seq in seqs]
            self._tables = [list(seq.block_table) for seq in seqs]
        self._lens = [len(seq) + 1 for seq in seqs]
        self._token_ids = [PENDING] * len(seqs)
        self.graphs[size].replay()
        return self.hidden[: len(seqs)]

    def _upload(self, seqs: list[Sequence], sources: list[int]) -> None:
        host, n = self.state.host(), len(seqs)
        fill_sampling(host, seqs)
        host["input_ids"][:n] = [seq.last_token for seq in seqs]
        host["sources"][:n] = sources
        host["context_lens"][:n] = [len(seq) for seq in seqs]
        # Padding rows are computed too, so they need an id that exists.
        host["input_ids"][n:] = host["context_lens"][n:] = 0
        for row, seq in zip(host["block_tables"], seqs, strict=False):
            row[: len(seq.block_table)] = seq.block_table
        self.state.upload()

    def _continues(self, seqs: list[Sequence]) -> bool:
        """Whether the state on the device is already right. Lengths and tables are compared too: a
        sequence may have been preempted and prefilled again since its last decode step. And ids:
        a caller of `step`'s parts may have accepted others than were sampled; ranks above 0 take
        those that they are told."""
        return (
            [seq.seq_id for seq in seqs] == self._seq_ids
            and [len(seq) for seq in seqs] == self._lens
            and [seq.block_table for seq in seqs] == self._tables
            and [seq.last_token for seq in seqs] == self._token_ids
        )

    def forget(self) -> None:
        """Describe the next batch anew: the sequences of a step that failed, prefilled again, may
        come back in the same blocks with other ids than the device has."""
        self._seq_ids = []

    def arrived(self, token_ids: list[int]) -> None:
        """The ids that the step launched last has sampled are known on the host."""
        self._token_ids = list(token_ids)  # the caller may put other ids into its list

    def override(self, token_ids: torch.Tensor) -> None:
        """Make token_ids [N], instead of what the graph sampled, the rows' next input."""
        self.state["input_ids"][: len(token_ids)] = token_ids
