"""Inputs: scheduled sequences -> the tensors of one step.

All numbers of a step are gathered in one int32 array on the host and copied to the device once,
from pinned memory, without waiting.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.context import Context


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model is called with: T new positions, without padding."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32, within each request
    context: Context


def prefill_inputs(seqs: list[Sequence], device: torch.device) -> StepInputs:
    """Concatenate the scheduled positions of all sequences. `block_tables` is there only when some
    sequence has history (an earlier chunk or a prefix hit) to attend to."""
    ids, positions, slots = [], [], []
    lens_q, lens_k = [0], [0]
    for seq in seqs:
        start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
        span = np.arange(start, end, dtype=np.int32)
        table = np.asarray(seq.block_table, dtype=np.int32)
        ids.append(np.asarray(seq.token_ids[start:end], dtype=np.int32))
        positions.append(span)
        slots.append(table[span // seq.block_size] * seq.block_size + span % seq.block_size)
        lens_q.append(end - start)
        lens_k.append(end)
    arrays = [
        np.concatenate(ids),
        np.concatenate(positions),
        np.concatenate(slots),
        np.cumsum(lens_q, dtype=np.int32),
        np.cumsum(lens_k, dtype=np.int32),
    ]
    has_history = any(seq.num_cached_tokens for seq in seqs)
    if has_history:
        arrays.append(_padded_tables(seqs))
    input_ids, position_ids, slot_mapping, cu_q, cu_k, *tables = _upload(arrays, device)
    context = Context(
        is_prefill=True,
        slot_mapping=slot_mapping,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max(lens_q),
        max_seqlen_k=max(lens_k),
        block_tables=tables[0] if has_history else None,
    )
    return StepInputs(input_ids, position_ids, context)


def decode_inputs(seqs: list[Sequence], device: torch.device) -> StepInputs:
    """One position per sequence: its last token, whose K/V goes to its last slot."""
    lengths = np.asarray([len(seq) for seq in seqs], dtype=np.int32)
    slots = [seq.block_table[-1] * seq.block_size + (len(seq) - 1) % seq.block_size for seq in seqs]
    arrays = [
        np.asarray([seq.last_token for seq in seqs], dtype=np.int32),
        lengths - 1,
        np.asarray(slots, dtype=np.int32),
        lengths,
        _padded_tables(seqs),
    ]
    input_ids, positions, slot_mapping, context_lens, block_tables = _upload(arrays, device)
    context = Context(
        is_prefill=False,
        slot_mapping=slot_mapping,
        context_lens=context_lens,
        block_tables=block_tables,
    )
    return StepInputs(input_ids, positions, context)


def temperatures(seqs: list[Sequence], device: torch.device) -> torch.Tensor | None:
    """[N] float32 for the sampler, or None when every sequence is greedy."""
    if all(seq.temperature == 0 for seq in seqs):
        return None
    host = torch.tensor([seq.temperature for seq in seqs], dtype=torch.float32)
    return _to_device(host, device)


def _padded_tables(seqs: list[Sequence]) -> np.ndarray:
    """Block tables as one array [N, longest], padded with -1."""
    tables = np.full((len(seqs), max(len(seq.block_table) for seq in seqs)), -1, dtype=np.int32)
    for row, seq in zip(tables, seqs, strict=True):
        row[: len(seq.block_table)] = seq.block_table
    return tables


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int32 arrays -> tensors of the same shapes on the device, by one copy."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    parts = _to_device(packed, device).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
