"""Control: what rank 0 tells the other ranks about a step, in as few bytes as will do.

The messages travel through one pipe per worker (engine/workers.py). A pipe needs no name, takes a
message of any size, and tells either end at once when the other one has died; a round trip takes
17 us, through shared memory and an event 20.

    prefill   of each sequence its new ids, where they begin, and its block table
    decode    of each row that does not simply go on from the decode step before: its length and
              block table; which sequences the rows are, if others than before; and the rows' last
              tokens, unless all of them are still on the GPU
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from nanovllm.engine.sequence import PENDING, Sequence


class PrefillRow(NamedTuple):
    """The scheduled positions of one sequence; the last two are int32 as bytes."""

    seq_id: int
    num_cached_tokens: int
    token_ids: bytes
    block_table: bytes


class DecodeRows(NamedTuple):
    """A decode step, as seen from the one before it. Steady decode is (None, [], None)."""

    seq_ids: list[int] | None  # None: the same rows as before
    changed: list[tuple[int, int, list[int]]]  # (row, length, block table)
    last_tokens: bytes | None  # int32 of all rows; None: all are PENDING


StepMessage = list[PrefillRow] | DecodeRows


@dataclass(slots=True, eq=False)
class Mirror:
    """What a worker knows of a Sequence: enough for inputs.py and the graphs, which take either."""

    seq_id: int
    block_size: int
    num_tokens: int
    block_table: list[int] | np.ndarray
    last_token: int = PENDING
    # Prefill only.
    num_cached_tokens: int = 0
    scheduled_token_ids: np.ndarray | None = None

    temperature: ClassVar[float] = 0.0  # rank 0 samples
    seed: ClassVar[int] = 0

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def num_scheduled_tokens(self) -> int:
        return self.num_tokens - self.num_cached_tokens


class StepWriter:
    """Rank 0's end: sequences -> message."""

    def __init__(self) -> None:
        # The latest decode step as the workers know it: seq_id -> (length, block table), by row.
        self._rows: dict[int, tuple[int, list[int]]] = {}

    def write(self, seqs: list[Sequence], is_prefill: bool) -> StepMessage:
        """Describe the step that the scheduler has just chosen. Each message must be sent."""
        if is_prefill:
            return [
                PrefillRow(
                    seq.seq_id,
                    seq.num_cached_tokens,
                    _int32(seq.scheduled_token_ids),
                    _int32(seq.block_table),
                )
                for seq in seqs
            ]
        rows, changed = {}, []
        for row, seq in enumerate(seqs):
            length, table = self._rows.get(seq.seq_id, (0, []))
            # The length too: it may have been preempted and prefilled since.
            if length + 1 != len(seq) or table != seq.block_table:
                table = list(seq.block_table)
                changed.append((row, len(seq), table))
            rows[seq.seq_id] = (len(seq), table)
        seq_ids = None if list(rows) == list(self._rows) else list(rows)
        self._rows = rows
        last_tokens = [seq.last_token for seq in seqs]
        all_pending = last_tokens.count(PENDING) == len(seqs)
        return DecodeRows(seq_ids, changed, None if all_pending else _int32(last_tokens))


class StepReader:
    """A worker's end: message -> mirrors of the sequences, in the same order."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._rows: dict[int, Mirror] = {}  # of the latest decode step

    def read(self, message: StepMessage, is_prefill: bool) -> list[Mirror]:
        """Messages must come in the order in which they were written."""
        if is_prefill:
            return [self._prefill_mirror(row) for row in message]
        seq_ids, changed, last_tokens = message
        new = {row: (length, table) for row, length, table in changed}
        rows = {}
        for row, seq_id in enumerate(self._rows if seq_ids is None else seq_ids):
            mirror = self._rows.get(seq_id)
            if mirror is None:
                mirror = Mirror(seq_id, self.block_size, *new[row])
            elif row in new:
                mirror.num_tokens, mirror.block_table = new[row]
            else:
                mirror.num_tokens += 1
            rows[seq_id] = mirror
        self._rows = rows
        mirrors = list(rows.values())
        tokens = [PENDING] * len(mirrors) if last_tokens is None else _array(last_tokens).tolist()
        for mirror, token in zip(mirrors, tokens, strict=True):
            mirror.last_token = token
        return mirrors

    def _prefill_mirror(self, row: PrefillRow) -> Mirror:
        ids = _array(row.token_ids)
        return Mirror(
            row.seq_id,
            self.block_size,
            num_tokens=row.num_cached_tokens + len(ids),
            block_table=_array(row.block_table),
            num_cached_tokens=row.num_cached_tokens,
            scheduled_token_ids=ids,
        )


def _int32(numbers: list[int]) -> bytes:
    return np.asarray(numbers, dtype=np.int32).tobytes()


def _array(numbers: bytes) -> np.ndarray:
    return np.frombuffer(numbers, dtype=np.int32)
