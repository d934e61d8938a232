"""Inputs: scheduled sequences -> the tensors of one step.

What the model needs is gathered in one int32 array on the host and copied to the device once; what
the sampler needs follows field by field. All from pinned memory, without waiting.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.sequence import PENDING, Sequence
from nanovllm.layers.sampler import SamplingInputs
from nanovllm.utils.context import Context


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model is called with: T new positions, without padding."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32, within each request
    context: Context


def prefill_arrays(seqs: list[Sequence]) -> list[np.ndarray]:
    """The scheduled positions of all sequences, concatenated: input_ids, positions, slot_mapping
    [T], cu_seqlens_q and cu_seqlens_k [N + 1], all int32."""
    ids, positions, slots = [], [], []
    lens_q, lens_k = [0], [0]
    for seq in seqs:
        start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
        span = np.arange(start, end, dtype=np.int32)
        table = np.asarray(seq.block_table, dtype=np.int32)
        ids.append(np.asarray(seq.scheduled_token_ids, dtype=np.int32))
        positions.append(span)
        slots.append(table[span // seq.block_size] * seq.block_size + span % seq.block_size)
        lens_q.append(end - start)
        lens_k.append(end)
    return [
        np.concatenate(ids),
        np.concatenate(positions),
        np.concatenate(slots),
        np.cumsum(lens_q, dtype=np.int32),
        np.cumsum(lens_k, dtype=np.int32),
    ]


def prefill_inputs(seqs: list[Sequence], device: torch.device) -> StepInputs:
    """The tensors of a prefill step. `block_tables` is there only when some sequence has history
    (an earlier chunk or a prefix hit) to attend to."""
    arrays = prefill_arrays(seqs)
    has_history = any(seq.num_cached_tokens for seq in seqs)
    if has_history:
        arrays.append(_padded_tables(seqs))
    input_ids, position_ids, slot_mapping, cu_q, cu_k, *tables = _upload(arrays, device)
    context = Context(
        is_prefill=True,
        slot_mapping=slot_mapping,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=int(np.diff(arrays[3]).max()),
        max_seqlen_k=int(np.diff(arrays[4]).max()),
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


def take_pending(
    input_ids: torch.Tensor, seqs: list[Sequence], sampled: torch.Tensor, rows: dict[int, int]
) -> None:
    """Fill in the input ids [N] of `seqs` that are still on the device only: in `sampled`, at the
    `rows` (by seq_id) that they had in the step before. Waits for nothing."""
    sources = [rows[seq.seq_id] if seq.last_token == PENDING else -1 for seq in seqs]
    if max(sources) >= 0:
        source = _to_device(torch.tensor(sources), input_ids.device)
        torch.where(source >= 0, sampled[source.clamp_min(0)], input_ids, out=input_ids)


def fill_sampling(host: dict[str, np.ndarray], seqs: list[Sequence]) -> None:
    """Write `seqs`' temperatures and seeds to the arrays of a graph's PackedBuffer."""
    host["temperatures"][: len(seqs)] = [seq.temperature for seq in seqs]
    host["seeds"][: len(seqs)] = [seq.seed for seq in seqs]


def sampling_inputs(
    seqs: list[Sequence], eos_token_ids: frozenset[int], vocab_size: int, device: torch.device
) -> SamplingInputs:
    """What the sampler needs for one token of each sequence; what nobody asks for stays None."""
    banned = _banned(seqs, eos_token_ids, device)
    if all(seq.temperature == 0 for seq in seqs):
        return SamplingInputs(banned=banned)
    params = [seq.sampling_params for seq in seqs]
    # As numbers that switch the filter off where a row does not use it.
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    top_p, min_p = [p.top_p for p in params], [p.min_p for p in params]

    def upload(numbers: list, dtype: torch.dtype) -> torch.Tensor:
        return _to_device(torch.tensor(numbers, dtype=dtype), device)

    return SamplingInputs(
        temperatures=upload([seq.temperature for seq in seqs], torch.float32),
        seeds=upload([seq.seed for seq in seqs], torch.int64),
        positions=upload([len(seq) for seq in seqs], torch.int64),
        top_k=upload(top_k, torch.int32) if min(top_k) < vocab_size else None,
        top_p=upload(top_p, torch.float32) if min(top_p) < 1 else None,
        min_p=upload(min_p, torch.float32) if max(min_p) > 0 else None,
        banned=banned,
    )


def _banned(
    seqs: list[Sequence], eos_token_ids: frozenset[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(rows, ids) that would end a sequence before its min_tokens."""
    pairs = []
    for row, seq in enumerate(seqs):
        if seq.num_completion_tokens < seq.sampling_params.min_tokens:
            ids = set(seq.sampling_params.stop_token_ids)
            pairs += [(row, i) for i in ids | (set() if seq.ignore_eos else eos_token_ids)]
    if not pairs:
        return None
    rows, ids = _to_device(torch.tensor(pairs).T.contiguous(), device)
    return rows, ids


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
