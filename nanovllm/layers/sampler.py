"""Sampler: logits of each request's last position -> one token id each."""

import torch
from torch import nn


class Sampler(nn.Module):
    """Gumbel-max sampling: argmax(logits / T + Gumbel noise) is a draw from softmax(logits / T)
    (Gumbel 1954), with no softmax, no cumulative sum and no host synchronization."""

    def forward(self, logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
        """logits [N, vocab]; temperatures [N] float32, 0 for argmax, or None if all are 0.
        Returns int64 [N]. A -inf logit is never chosen."""
        if temperatures is None:
            return logits.argmax(dim=-1)
        logits = logits.float()
        greedy = temperatures.unsqueeze(1) == 0
        # With the maximum subtracted first, a tiny temperature sends the others to -inf instead
        # of overflowing the maximum to +inf.
        scaled = logits - logits.max(dim=-1, keepdim=True).values
        scaled /= temperatures.unsqueeze(1).masked_fill(greedy, 1.0)
        # -log of an exponential variate is Gumbel noise; the clamp keeps log(0) out.
        noise = torch.empty_like(scaled).exponential_()
        noise = noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_().neg_()
        return (scaled + noise.masked_fill_(greedy, 0.0)).argmax(dim=-1)
