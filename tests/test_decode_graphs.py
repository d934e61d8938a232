"""DecodeGraphs on CPU: buckets, padding rows, and when the batch must be described anew. In place
of the model, a replayed graph runs arithmetic over what it finds in the state."""

from collections.abc import Sequence as Rows
from typing import NamedTuple

import pytest
import torch
from checkpoints import random_ids
from replaying import fake_capture
from torch import nn

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.decode_graphs import MAX_GRAPH_BATCH, DecodeGraphs, graph_batch_sizes
from nanovllm.engine.sequence import PENDING, Sequence

BLOCK_SIZE = 4
WIDTH = 6  # blocks in a table


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (16, [1, 2, 4, 8, 16]),
        (17, [1, 2, 4, 8, 16, 17]),
        (20, [1, 2, 4, 8, 16, 20]),
        (33, [1, 2, 4, 8, 16, 32, 33]),
        (512, [1, 2, 4, 8, *range(16, 513, 16)]),
        (1000, [1, 2, 4, 8, *range(16, 513, 16)]),
    ],
)
def test_case_22_bucket_sizes_have_no_gap(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_batch_sizes(max_num_seqs) == sizes


# --- a fake device --------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a replayed graph found in its rows."""

    size: int
    input_ids: list[int]
    context_lens: list[int]
    temperatures: list[float]
    seeds: list[int]
    block_tables: list[list[int]]


class Device:
    """The graphs under test and what their replays saw; `ids_of` is what such a step samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> None:
        self.seen: list[Seen] = []
        self.captured: list[int] = []
        self.recording = False
        fake_capture(monkeypatch, self._step)
        self.sampled = torch.zeros(max_num_seqs, dtype=torch.int32)
        config = Config(
            model=".",
            max_num_seqs=max_num_seqs,
            max_model_len=WIDTH * BLOCK_SIZE,
            kvcache_block_size=BLOCK_SIZE,
        )
        self.graphs = DecodeGraphs(nn.Identity(), config, self.sampled)
        self.recording = True
        self.num_uploads = 0
        upload = self.graphs.state.upload

        def counted() -> None:
            self.num_uploads += 1
            upload()

        monkeypatch.setattr(self.graphs.state, "upload", counted)

    def _step(self, graphs: DecodeGraphs, size: int) -> None:
        state = graphs.state
        graphs.hidden = torch.arange(float(len(state["input_ids"]))).unsqueeze(1)
        if not self.recording:
            self.captured.append(size)
            return
        names = ("input_ids", "context_lens", "temperatures", "seeds", "block_tables")
        self.seen.append(Seen(size, *(state[name][:size].tolist() for name in names)))
        ids, lens = state["input_ids"][:size], state["context_lens"][:size]
        graphs.sampled[:size] = ids.copy_(self.ids_of(ids, lens))
        lens += lens > 0

    @staticmethod
    def ids_of(input_ids: torch.Tensor, context_lens: torch.Tensor) -> torch.Tensor:
        return (input_ids * 7 + context_lens * 3 + 1) % 1000

    def run(self, seqs: list[Sequence], rows_before: dict[int, int] | None = None) -> Seen:
        """Launch a decode step; what its graph saw."""
        hidden = self.graphs.launch(seqs, rows_before or {})
        assert hidden.flatten().tolist() == [*range(len(seqs))]
        return self.seen[-1]

    def accept(self, seqs: list[Sequence]) -> list[int]:
        """The plain loop's other half: append what was sampled, and grow the tables."""
        token_ids = self.sampled[: len(seqs)].tolist()
        self.graphs.arrived(token_ids)
        for seq, token_id in zip(seqs, token_ids, strict=True):
            seq.append_token(token_id)
            grow(seq)
        return token_ids


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Graphs for up to 20 sequences of 6 blocks."""
    return Device(monkeypatch, 20)


def sequence(length: int, first_block: int = 0, **params: float | int) -> Sequence:
    """A running sequence: all but its last token are in the pool."""
    seq = Sequence(random_ids(length, seed=length), SamplingParams(**params), BLOCK_SIZE)
    seq.block_table = [*range(first_block, first_block + seq.num_blocks)]
    return seq


def grow(seq: Sequence, block_id: int = 90) -> None:
    """What BlockManager.may_append does, with a block of a fixed id."""
    if len(seq.block_table) < seq.num_blocks:
        seq.block_table.append(block_id)


def assert_sees(seen: Seen, seqs: Rows[Sequence]) -> None:
    """The graph's rows are exactly these sequences, whose last tokens are known, and padding."""
    n = len(seqs)
    assert seen.input_ids[:n] == [seq.last_token for seq in seqs]
    assert seen.context_lens == [len(seq) for seq in seqs] + [0] * (seen.size - n)
    assert seen.temperatures[:n] == pytest.approx([seq.temperature for seq in seqs])
    assert [seed % 2**64 for seed in seen.seeds[:n]] == [seq.seed % 2**64 for seq in seqs]
    for table, seq in zip(seen.block_tables, seqs, strict=False):
        assert table[: seq.num_blocks] == seq.block_table


# --- buckets and rows -----------------------------------------------------------------------------


def test_captured_largest_first(device: Device) -> None:
    """Once to compile, and once more as a graph, which runs nothing."""
    assert device.captured == [20, 16, 8, 4, 2, 1] == [*device.graphs.graphs]


@pytest.mark.parametrize(
    ("batch", "bucket"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 20), (20, 20)],
)
def test_a_batch_runs_in_the_smallest_bucket_that_holds_it(
    device: Device, batch: int, bucket: int
) -> None:
    assert device.graphs.fits(batch)
    assert device.run([sequence(5) for _ in range(batch)]).size == bucket
    replays = {size: graph.num_replays for size, graph in device.graphs.graphs.items()}
    assert replays == {size: int(size == bucket) for size in replays}


def test_a_batch_above_512_takes_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Device(monkeypatch, 600).graphs
    assert graphs.fits(MAX_GRAPH_BATCH) and MAX_GRAPH_BATCH == 512
    assert not graphs.fits(513)


def test_every_row_is_described(device: Device) -> None:
    """Seeds use all of their 64 bits; temperatures are per row."""
    seqs = [
        sequence(3, first_block=5, seed=2**64 - 1, temperature=0),
        sequence(4, first_block=9, seed=-(2**63), temperature=0.7),
        sequence(21, first_block=20, seed=12345678901234567890, temperature=1.5),
    ]
    assert_sees(device.run(seqs), seqs)


def test_padding_rows_store_nothing_and_read_nothing(device: Device) -> None:
    """A batch of 9 in the graph of 16, after a batch of 20 has filled every row: length 0, from
    which slot -1 follows, and an id that exists. They stay so while steps go on."""
    device.run([sequence(24) for _ in range(20)])
    seqs = [sequence(3 + i) for i in range(9)]
    seen = device.run(seqs)
    assert_sees(seen, seqs)
    assert seen.input_ids[9:] == [0] * 7
    device.accept(seqs)
    seen = device.run(seqs)
    assert seen.context_lens[9:] == [0] * 7


def test_case_08_no_stale_block_table_columns(device: Device) -> None:
    """Long contexts, then short ones in the same rows, several times: the host's buffers take
    turns, and each still holds what it held two batches ago."""
    for round_ in range(3):
        long = [sequence(24, first_block=10 * i + round_) for i in range(3)]
        short = [sequence(1 + i, first_block=50 + 10 * i + round_) for i in range(3)]
        for seqs in (long, short):
            assert_sees(device.run(seqs), seqs)


# --- what makes an upload -------------------------------------------------------------------------


def test_steady_decode_uploads_only_at_new_blocks(device: Device) -> None:
    """Lengths 5 and 6: tables grow after 4 and after 3 steps. Each step sees what was accepted."""
    seqs = [sequence(5), sequence(6, first_block=10)]
    uploads = []
    for _ in range(8):
        assert_sees(device.run(seqs), seqs)
        uploads.append(device.num_uploads)
        device.accept(seqs)
    # A block opens when the length becomes 9: at the fifth step, and at the fourth.
    assert uploads == [1, 1, 1, 2, 3, 3, 3, 4]


def test_a_row_that_leaves_or_joins_or_moves(device: Device) -> None:
    a, b, c = (sequence(5, first_block=10 * i) for i in range(3))
    for i, seqs in enumerate(([a, b], [a, b, c], [a, c], [c, a], [c, a, b]), start=1):
        assert_sees(device.run(seqs), seqs)
        assert device.num_uploads == i
        device.accept(seqs)


def test_equal_lengths_and_tables_of_another_sequence(device: Device) -> None:
    """One finished, and the next has got its blocks and its length."""
    first, second = sequence(5), sequence(5)
    second.token_ids[-1] = 77
    device.run([first])
    device.accept([first])
    second.append_token(78)
    assert_sees(device.run([second]), [second])


def test_a_table_that_changed_since(device: Device) -> None:
    """Preempted, prefilled again, and now as long as before in other blocks."""
    seq = sequence(6)
    device.run([seq])
    device.accept([seq])
    seq.block_table = [40, 41]
    assert_sees(device.run([seq]), [seq])
    assert device.num_uploads == 2


def test_a_length_that_changed_since(device: Device) -> None:
    """Preempted, prefilled again into the same blocks, where it got one token more."""
    seq = sequence(5)
    device.run([seq])
    device.accept([seq])
    seq.append_token(9)
    assert_sees(device.run([seq]), [seq])
    assert device.num_uploads == 2


def test_an_id_that_was_accepted_instead_of_the_sampled_one(device: Device) -> None:
    """By a caller of the step's parts."""
    seq = sequence(5)
    device.run([seq])
    device.accept([seq])
    seq.token_ids[-1] = (seq.last_token + 1) % 1000
    assert_sees(device.run([seq]), [seq])
    assert device.num_uploads == 2


def test_a_batch_that_failed_comes_back_in_its_old_blocks(device: Device) -> None:
    """Its ids never arrived; prefilled again, it may have got another one."""
    seq = sequence(5)
    device.run([seq])
    device.graphs.forget()  # as the runner does at every prefill
    seq.append_token(999)
    assert_sees(device.run([seq]), [seq])
    assert device.num_uploads == 2


def test_override_replaces_what_was_sampled(device: Device) -> None:
    """Filters choose another id than the graph: that is the next input, without an upload."""
    seqs = [sequence(5), sequence(6, first_block=10)]
    device.run(seqs)
    device.sampled[:2] = torch.tensor([500, 501], dtype=torch.int32)
    device.graphs.override(device.sampled[:2])
    assert device.accept(seqs) == [500, 501]
    assert_sees(device.run(seqs), seqs)
    assert device.num_uploads == 1


# --- one step ahead -------------------------------------------------------------------------------


def test_pending_tokens_of_a_steady_batch_stay_on_the_device(device: Device) -> None:
    """No id comes to the host, and yet each step's input is what the step before sampled."""
    seqs = [sequence(5), sequence(6, first_block=10)]
    rows = {seq.seq_id: row for row, seq in enumerate(seqs)}
    known = [list(seq.token_ids) for seq in seqs]
    for _ in range(10):
        seen = device.run(seqs, rows)
        assert seen.input_ids == [ids[-1] for ids in known]
        assert seen.context_lens == [len(ids) for ids in known]
        for ids, seq, token_id in zip(known, seqs, device.sampled.tolist(), strict=False):
            ids.append(token_id)
            seq.append_token(PENDING)
            grow(seq)
    assert device.num_uploads == 5, "at the start, and where a table grew"


def test_pending_tokens_come_from_the_rows_of_the_step_before(device: Device) -> None:
    """That step may have been a prefill, or have had other rows; known ids are uploaded."""
    a, b, c = (sequence(5, first_block=10 * i) for i in range(3))
    device.sampled[:4] = torch.tensor([600, 601, 602, 603], dtype=torch.int32)
    a.append_token(PENDING)
    c.append_token(PENDING)
    seen = device.run([c, b, a], {a.seq_id: 3, 123456: 0, c.seq_id: 1})
    assert seen.input_ids[:3] == [601, b.last_token, 603]
    assert seen.context_lens == [6, 5, 6, 0]


def test_a_pending_token_that_no_step_will_bring_is_an_error(device: Device) -> None:
    """Rather than a wrong id."""
    seq = sequence(5)
    seq.append_token(PENDING)
    with pytest.raises(KeyError):
        device.run([seq], {})


def test_rows_that_trade_places_while_pending(device: Device) -> None:
    a, b = sequence(5), sequence(6, first_block=10)
    device.run([a, b], {})
    first, second = device.sampled[:2].tolist()
    for seq in (a, b):
        seq.append_token(PENDING)
    seen = device.run([b, a], {a.seq_id: 0, b.seq_id: 1})
    assert seen.input_ids == [second, first]
    assert seen.context_lens == [7, 6]
