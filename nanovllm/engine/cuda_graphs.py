"""CudaGraphs: the decode forward pass, recorded once per batch-size bucket and replayed."""

from bisect import bisect_left

import torch
from torch import nn

from nanovllm.engine.inputs import StepInputs
from nanovllm.utils.context import Context, use_context

MAX_GRAPH_BATCH = 512


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 16, and the largest batch itself, so that no decode batch up to
    min(max_num_seqs, 512) is without a graph."""
    limit = min(max_num_seqs, MAX_GRAPH_BATCH)
    sizes = {1, 2, 4, 8, *range(16, limit + 1, 16), limit}
    return sorted(size for size in sizes if size <= limit)


class CudaGraphs:
    """Static input buffers and one graph per bucket, all in one memory pool.

    A batch runs in the smallest bucket that holds it; the rows beyond it get slot -1 (nothing is
    stored) and context length 0 (nothing is read).
    """

    def __init__(
        self, model: nn.Module, max_num_seqs: int, max_num_blocks: int, device: torch.device
    ) -> None:
        """max_num_blocks: the width of a block table at max_model_len. Captures all graphs."""
        self.model = model
        self.sizes = graph_batch_sizes(max_num_seqs)
        largest = self.sizes[-1]

        def rows(fill: int, *width: int) -> torch.Tensor:
            return torch.full((largest, *width), fill, dtype=torch.int32, device=device)

        self.input_ids, self.positions, self.context_lens = rows(0), rows(0), rows(0)
        self.slot_mapping = rows(-1)
        self.block_tables = rows(-1, max_num_blocks)
        self.hidden: torch.Tensor | None = None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # Largest first: its activations set the size of the pool, the others fit inside.
        for size in reversed(self.sizes):
            self._capture(size)

    def _capture(self, size: int) -> None:
        with use_context(self._context(size)):
            hidden = self.model(self.input_ids[:size], self.positions[:size])  # warm-up
            if self.hidden is None:
                self.hidden = torch.empty_like(hidden)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = self.graphs[self.sizes[-1]].pool() if self.graphs else None
            with torch.cuda.graph(graph, pool):
                self.hidden[:size] = self.model(self.input_ids[:size], self.positions[:size])
        self.graphs[size] = graph

    def _context(self, size: int) -> Context:
        return Context(
            is_prefill=False,
            slot_mapping=self.slot_mapping[:size],
            context_lens=self.context_lens[:size],
            block_tables=self.block_tables[:size],
        )

    def fits(self, batch_size: int) -> bool:
        return batch_size <= self.sizes[-1]

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Decode inputs of N <= largest bucket rows -> hidden states [N, hidden], valid until the
        next call."""
        context = inputs.context
        num_rows, width = context.block_tables.shape
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        self.input_ids[:num_rows] = inputs.input_ids
        self.positions[:num_rows] = inputs.positions
        self.slot_mapping[:num_rows] = context.slot_mapping
        self.slot_mapping[num_rows:size] = -1
        self.context_lens[:num_rows] = context.context_lens
        self.context_lens[num_rows:size] = 0
        # Columns past `width` keep old entries: no kernel reads a table beyond context_lens.
        self.block_tables[:num_rows, :width] = context.block_tables
        self.graphs[size].replay()
        return self.hidden[:num_rows]
