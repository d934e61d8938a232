"""Token embedding and LM head, split over ranks by vocabulary rows."""

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import WeightSource, check_shape, linear
from nanovllm.utils.parallel import Summand, TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Rank r holds rows [r * n, (r + 1) * n) of the vocabulary, n = ceil(vocab_size / size); rows
    past the vocabulary are zero padding. Foreign tokens give 0, the sum over ranks is whole."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.num_rows = -(-vocab_size // tp.size)
        self.first_row = tp.rank * self.num_rows
        self.weight = nn.Parameter(torch.empty(self.num_rows, hidden_size), requires_grad=False)
        self.weight.weight_loader = self._load

    def _load(self, source: WeightSource, shard_id: Hashable = None) -> None:
        check_shape(source, (self.vocab_size, self.weight.shape[1]))
        end = min(self.first_row + self.num_rows, self.vocab_size)
        num_real = max(end - self.first_row, 0)
        if num_real:
            self.weight.data[:num_real].copy_(source[self.first_row : end])
        self.weight.data[num_real:].zero_()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor | Summand:
        """[T] int -> [T, hidden], or this rank's summand of it"""
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.first_row
        foreign = (local < 0) | (local >= self.num_rows)
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        rows = rows.masked_fill(foreign.unsqueeze(-1), 0)
        summand = self.tp.summand(*rows.shape, rows.dtype, turn=0)
        if summand is None:
            return self.tp.all_reduce(rows)
        summand.x.copy_(rows)
        return summand


class ParallelLMHead(VocabParallelEmbedding):
    """Logits, whole on rank 0. Shares the embedding's weight when `tie_word_embeddings`."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[N, hidden] -> [N, vocab_size] on rank 0, None elsewhere."""
        logits = self.tp.gather(linear(hidden, self.weight, None))
        # The padding rows stand after the real vocabulary; cut off, they are never sampled.
        return None if logits is None else logits[:, : self.vocab_size]
