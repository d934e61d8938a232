"""What rank 0 tells the other ranks: whatever the scheduler does, a worker's inputs are rank 0's,
and a step of steady decode takes a few bytes."""

import pickle
import random

import numpy as np
import pytest
import torch
from checkpoints import random_ids
from scheduling import FakeModel, add_request, make_scheduler
from torch import nn

from nanovllm.config import Config
from nanovllm.engine.control import StepReader, StepWriter
from nanovllm.engine.decode_graphs import DecodeGraphs
from nanovllm.engine.inputs import decode_inputs, prefill_inputs
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import PENDING, Sequence

CPU = torch.device("cpu")


class Link:
    """The two ends of the control channel, with the bytes of each message in between."""

    def __init__(self, block_size: int) -> None:
        self.writer, self.reader = StepWriter(), StepReader(block_size)
        self.sizes: list[int] = []

    def check(self, seqs: list[Sequence], is_prefill: bool) -> list[object]:
        """Send a step; the model's inputs must be the same at both ends. Returns the mirrors."""
        data = pickle.dumps(("launch", self.writer.write(seqs, is_prefill), is_prefill, False))
        self.sizes.append(len(data))
        _, message, *_ = pickle.loads(data)
        mirrors = self.reader.read(message, is_prefill)
        assert [mirror.seq_id for mirror in mirrors] == [seq.seq_id for seq in seqs]
        make_inputs = prefill_inputs if is_prefill else decode_inputs
        here, there = make_inputs(seqs, CPU), make_inputs(mirrors, CPU)
        assert here.input_ids.tolist() == there.input_ids.tolist()
        assert here.positions.tolist() == there.positions.tolist()
        for name in here.context.__slots__:
            ours, theirs = getattr(here.context, name), getattr(there.context, name)
            if isinstance(ours, torch.Tensor):
                ours, theirs = ours.tolist(), theirs.tolist()
            assert ours == theirs, name
        return mirrors


def run_step(link: Link, scheduler: Scheduler, model: FakeModel) -> list[Sequence]:
    seqs, is_prefill = scheduler.schedule()
    link.check(seqs, is_prefill)
    scheduler.postprocess(seqs, model.run(seqs, is_prefill), is_prefill)
    return seqs


@pytest.mark.parametrize("seed", range(5))
def test_case_19_mirrors_give_the_inputs_of_the_sequences(seed: int) -> None:
    """60 requests with prefix hits, chunks, more sequences than a step holds, preemptions, aborts
    and steps that fail: in every step a worker has all ids, positions, slots and tables."""
    rng = random.Random(seed)
    scheduler = make_scheduler(12, block_size=4, max_num_batched_tokens=11, max_num_seqs=4)
    scheduler.learns_headroom = False  # which would leave few to preempt
    model, link = FakeModel(scheduler), Link(4)
    num_left, live = 60, []
    while num_left or not scheduler.is_finished():
        if num_left and (scheduler.is_finished() or rng.random() < 0.3):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 14))]
            live.append(add_request(scheduler, prompt, max_tokens=rng.randint(1, 20)))
            num_left -= 1
        if rng.random() < 0.02:
            scheduler.abort(rng.choice(live))
        if scheduler.is_finished():
            continue
        if rng.random() < 0.03:
            seqs, is_prefill = scheduler.schedule()
            link.check(seqs, is_prefill)
            scheduler.rollback(seqs)
        else:
            run_step(link, scheduler, model)
    assert scheduler.num_preemptions >= 10
    assert len(link.reader._rows) <= 4, "a worker keeps more than the rows of one step"


def test_case_19_back_in_the_same_blocks() -> None:
    """Preempted between two decode steps and prefilled into the blocks it had: a worker must not
    take it for one that simply went on, for it has grown by two."""
    scheduler = make_scheduler(1)
    model, link = FakeModel(scheduler), Link(256)
    seq = add_request(scheduler, [1, 2, 3], max_tokens=9)
    for _ in range(2):
        run_step(link, scheduler, model)
    scheduler.running.remove(seq)
    scheduler.preempt(seq)
    for _ in range(3):
        run_step(link, scheduler, model)
    assert seq.block_table == [0] and len(seq) == 8


def test_tokens_on_the_way_stay_on_the_device() -> None:
    """Run-ahead: a row whose token rank 0 does not know yet is pending for the workers too, beside
    rows whose token they are told."""
    scheduler, link = make_scheduler(16, block_size=4), Link(4)
    first = add_request(scheduler, [1, 2, 3])
    seqs, is_prefill = scheduler.schedule()
    link.check(seqs, is_prefill)
    in_flight = scheduler.advance(seqs, is_prefill)
    seqs, is_prefill = scheduler.schedule()
    assert not is_prefill and first.last_token == PENDING
    (mirror,) = link.check(seqs, is_prefill)
    assert mirror.last_token == PENDING
    scheduler.commit(in_flight, [7])
    scheduler.commit(scheduler.advance(seqs, is_prefill), [8])
    add_request(scheduler, [4, 5])
    seqs, is_prefill = scheduler.schedule()
    link.check(seqs, is_prefill)
    scheduler.advance(seqs, is_prefill)
    seqs, is_prefill = scheduler.schedule()
    assert [mirror.last_token for mirror in link.check(seqs, is_prefill)] == [8, PENDING]


@pytest.mark.parametrize("batch", [1, 256])
def test_a_step_of_steady_decode_takes_a_few_bytes(batch: int) -> None:
    """However many sequences and however long they are: four bytes for each token that rank 0
    knows, none for those still on the device; a row that gets a block adds its table."""
    scheduler, link = make_scheduler(4 * batch, max_num_seqs=batch), Link(256)
    for _ in range(batch):
        add_request(scheduler, random_ids(510), max_tokens=9)
    while scheduler.waiting:
        step = scheduler.schedule()
        scheduler.postprocess(step.seqs, [7] * len(step.seqs), step.is_prefill)
    sizes = {}  # by the sequences' length
    for length in range(511, 516):
        step = scheduler.schedule()
        assert not step.is_prefill and [len(seq) for seq in step.seqs] == [length] * batch
        link.check(*step)
        sizes[length] = link.sizes[-1]
        in_flight = scheduler.advance(*step)
        if length < 515:
            scheduler.commit(in_flight, [7] * batch)
    link.check(*scheduler.schedule())
    assert link.sizes[-1] <= 100
    assert sizes[512] == sizes[514] == sizes[515] <= 100 + 4 * batch
    assert sizes[512] < sizes[513] <= 100 + 24 * batch


def test_only_new_positions_travel_in_prefill() -> None:
    """A prompt of 240,000 ids in chunks of 16,384: each message holds its chunk's ids, four bytes
    each, and the block table."""
    scheduler = make_scheduler(1000, max_num_batched_tokens=16384, max_model_len=250_000)
    link = Link(256)
    ids = np.random.default_rng(0).integers(0, 150_000, 240_000).tolist()
    seq = add_request(scheduler, ids)
    chunks = []
    while scheduler.waiting:
        step = scheduler.schedule()
        chunks.append(seq.num_scheduled_tokens)
        link.check(*step)
        scheduler.postprocess(step.seqs, [7], step.is_prefill)
    assert chunks == [16384] * 14 + [10624]
    for size, chunk in zip(link.sizes, chunks, strict=True):
        assert 4 * chunk < size <= 4 * chunk + 4 * seq.num_blocks + 200


# --- on a GPU, a rank above 0, step by step -------------------------------------------------------


class OtherRank(nn.Module):
    """A model as ranks above 0 have it, without logits; rank 0 samples 5, 6, 7, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.tp = self.lm_head = self

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(input_ids), 2)

    def compute_logits(self, hidden: torch.Tensor) -> None:
        return None

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(torch.arange(5, 5 + len(x)))


def test_decode_graphs_of_a_rank_above_0() -> None:
    """What a graph of theirs holds: the ids that rank 0 sampled become the next input, and every
    context but those of padding rows grows by one."""
    sampled = torch.zeros(4, dtype=torch.int32)
    config = Config(model=".", max_num_seqs=4, max_model_len=8, kvcache_block_size=4)
    graphs = DecodeGraphs(OtherRank(), config, sampled, record=lambda *_: {})
    graphs.state["context_lens"].copy_(torch.tensor([3, 8, 1, 0]))
    graphs._step(4)
    assert sampled.tolist() == graphs.state["input_ids"].tolist() == [5, 6, 7, 8]
    assert graphs.state["context_lens"].tolist() == [4, 9, 2, 0]
