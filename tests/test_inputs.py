"""Inputs: the tensors of the worked examples' steps, value by value, on the CPU."""

from dataclasses import fields

import pytest
import torch
from scheduling import FakeModel, add_request, make_scheduler, put_first, run_step

from nanovllm import SamplingParams
from nanovllm.engine.inputs import StepInputs, decode_inputs, prefill_inputs, sampling_inputs
from nanovllm.engine.sequence import Sequence

CPU = torch.device("cpu")


class InputsModel(FakeModel):
    """A fake model that builds each step's tensors, as the real runner does."""

    inputs: StepInputs

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        self.inputs = (prefill_inputs if is_prefill else decode_inputs)(seqs, CPU)
        return super().run(seqs, is_prefill)


def values(inputs: StepInputs) -> dict[str, object]:
    """The lists and numbers of a step, without what the step does not use. All tensors int32."""
    context = inputs.context
    found: dict[str, object] = {"input_ids": inputs.input_ids, "positions": inputs.positions}
    found |= {name: getattr(context, name) for name in ("slot_mapping", "block_tables")}
    if context.is_prefill:
        assert context.context_lens is None
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    else:
        assert context.cu_seqlens_q is context.cu_seqlens_k is None
        names = ("context_lens",)
    found |= {name: getattr(context, name) for name in names}
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.int32 and value.is_contiguous(), name
            found[name] = value.tolist()
    return found


def last_rows(inputs: StepInputs) -> list[int]:
    """Rows of the step's positions whose logits are sampled from, as the model finds them."""
    return (inputs.context.cu_seqlens_q[1:] - 1).tolist()


def test_example_a_one_request() -> None:
    scheduler = make_scheduler(num_blocks=4)
    model = InputsModel(scheduler, vocab_size=701)
    seq = add_request(scheduler, [100, 200, 300], max_tokens=3)
    run_step(scheduler, model)
    assert values(model.inputs) == {
        "input_ids": [100, 200, 300],
        "positions": [0, 1, 2],
        "slot_mapping": [0, 1, 2],
        "cu_seqlens_q": [0, 3],
        "cu_seqlens_k": [0, 3],
        "max_seqlen_q": 3,
        "max_seqlen_k": 3,
        "block_tables": None,
    }
    for position in (3, 4):
        run_step(scheduler, model)
        assert values(model.inputs) == {
            "input_ids": [seq.token_ids[position]],
            "positions": [position],
            "slot_mapping": [position],
            "context_lens": [position + 1],
            "block_tables": [[0]],
        }


def test_example_c_a_block_boundary() -> None:
    scheduler = make_scheduler(num_blocks=12)
    put_first(scheduler.block_manager, 3, 9)
    model = InputsModel(scheduler)
    seq = add_request(scheduler, [7] * 256, max_tokens=3)
    run_step(scheduler, model)
    assert values(model.inputs)["slot_mapping"] == list(range(3 * 256, 4 * 256))
    for position, slot in [(256, 9 * 256), (257, 9 * 256 + 1)]:
        run_step(scheduler, model)
        assert values(model.inputs) == {
            "input_ids": [seq.token_ids[position]],
            "positions": [position],
            "slot_mapping": [slot],
            "context_lens": [position + 1],
            "block_tables": [[3, 9]],
        }
    assert len(scheduler.block_manager.free_block_ids) == 12


def test_example_lifecycle() -> None:
    scheduler = make_scheduler(num_blocks=4)
    model = InputsModel(scheduler)
    add_request(scheduler, range(64), max_tokens=2)
    add_request(scheduler, range(96), max_tokens=3)
    run_step(scheduler, model)
    assert values(model.inputs) == {
        "input_ids": [*range(64), *range(96)],
        "positions": [*range(64), *range(96)],
        "slot_mapping": [*range(64), *range(256, 352)],
        "cu_seqlens_q": [0, 64, 160],
        "cu_seqlens_k": [0, 64, 160],
        "max_seqlen_q": 96,
        "max_seqlen_k": 96,
        "block_tables": None,
    }
    assert model.inputs.input_ids.shape == (160,) and last_rows(model.inputs) == [63, 159]
    run_step(scheduler, model)
    decode = values(model.inputs)
    assert decode["positions"] == [64, 96] and decode["context_lens"] == [65, 97]
    assert decode["slot_mapping"] == [64, 352] and decode["block_tables"] == [[0], [1]]


def test_example_chunk() -> None:
    scheduler = make_scheduler(num_blocks=32, max_num_batched_tokens=512)
    put_first(scheduler.block_manager, 17, 5, 23, 11)
    model = InputsModel(scheduler, vocab_size=701)
    a = add_request(scheduler, [i % 701 for i in range(700)])
    b = add_request(scheduler, range(32))
    run_step(scheduler, model)
    first = values(model.inputs)
    assert first["positions"] == list(range(512)) and first["block_tables"] is None
    assert first["slot_mapping"] == [*range(17 * 256, 18 * 256), *range(5 * 256, 6 * 256)]
    run_step(scheduler, model)
    assert values(model.inputs) == {
        "input_ids": [*a.token_ids[512:700], *range(32)],
        "positions": [*range(512, 700), *range(32)],
        "slot_mapping": [*range(5888, 6076), *range(2816, 2848)],
        "cu_seqlens_q": [0, 188, 220],
        "cu_seqlens_k": [0, 700, 732],
        "max_seqlen_q": 188,
        "max_seqlen_k": 700,
        "block_tables": [[17, 5, 23], [11, -1, -1]],
    }
    assert last_rows(model.inputs) == [187, 219]
    run_step(scheduler, model)
    assert values(model.inputs) == {
        "input_ids": [a.token_ids[700], b.token_ids[32]],
        "positions": [700, 32],
        "slot_mapping": [6076, 2848],
        "context_lens": [701, 33],
        "block_tables": [[17, 5, 23], [11, -1, -1]],
    }


def test_example_prefix() -> None:
    scheduler = make_scheduler(num_blocks=8)
    model = InputsModel(scheduler)
    add_request(scheduler, [*range(512), *[601] * 108], max_tokens=1)
    run_step(scheduler, model)
    assert model.inputs.context.block_tables is None
    second = add_request(scheduler, [*range(512), *[602] * 108])
    run_step(scheduler, model)
    table = second.block_table
    assert values(model.inputs) == {
        "input_ids": [602] * 108,
        "positions": list(range(512, 620)),
        "slot_mapping": list(range(table[2] * 256, table[2] * 256 + 108)),
        "cu_seqlens_q": [0, 108],
        "cu_seqlens_k": [0, 620],
        "max_seqlen_q": 108,
        "max_seqlen_k": 620,
        "block_tables": [table],
    }
    assert table[:2] == [0, 1]


@pytest.mark.parametrize(("position", "slot"), [(0, 68), (6, 22), (8, 92)])
def test_example_slots(position: int, slot: int) -> None:
    """Block size 4, table [17, 5, 23], once as a prefill position and once as a decode position."""
    seq = Sequence(list(range(position + 1)), block_size=4)
    seq.block_table = [17, 5, 23]
    seq.num_cached_tokens, seq.num_scheduled_tokens = position, 1
    assert prefill_inputs([seq], CPU).context.slot_mapping.tolist() == [slot]
    seq.block_table = [17, 5, 23][: seq.num_blocks]
    assert decode_inputs([seq], CPU).context.slot_mapping.tolist() == [slot]


def test_block_tables_are_there_for_all_once_one_sequence_has_history() -> None:
    """A cut first sequence and a fresh second one: the whole step takes the paged path."""
    seqs = [Sequence(list(range(9)), block_size=4), Sequence([5, 6], block_size=4)]
    seqs[0].block_table, seqs[1].block_table = [2, 0, 1], [3]
    seqs[0].num_scheduled_tokens, seqs[1].num_scheduled_tokens = 9, 2
    assert prefill_inputs(seqs, CPU).context.block_tables is None
    seqs[0].num_cached_tokens, seqs[0].num_scheduled_tokens = 8, 1
    assert prefill_inputs(seqs, CPU).context.block_tables.tolist() == [[2, 0, 1], [3, -1, -1]]


def test_prefill_of_a_chunk_stops_at_the_scheduled_positions() -> None:
    """K lengths are cached + scheduled: later chunks of the prompt do not count yet."""
    seq = Sequence(list(range(20)), block_size=4)
    seq.block_table = [0, 1, 2, 3, 4]
    seq.num_cached_tokens, seq.num_scheduled_tokens = 6, 7
    inputs = values(prefill_inputs([seq], CPU))
    assert inputs["input_ids"] == inputs["positions"] == inputs["slot_mapping"] == [*range(6, 13)]
    assert (inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]) == ([0, 7], [0, 13])


# --- what the sampler is given --------------------------------------------------------------------


def sampling_values(*each: SamplingParams) -> dict[str, object]:
    """What the sampler gets for one prompt of 3 ids per `each`; EOS ids 5 and 9, vocabulary 100."""
    seqs = [Sequence([1, 2, 3], params) for params in each]
    inputs = sampling_inputs(seqs, frozenset({5, 9}), 100, CPU)
    found = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    if inputs.banned is not None:
        rows, ids = inputs.banned
        found["banned"] = sorted(zip(rows.tolist(), ids.tolist(), strict=True))
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def test_all_greedy_needs_nothing() -> None:
    greedy = SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1, seed=7)
    assert set(sampling_values(greedy, greedy).values()) == {None}


def test_a_batch_in_which_nobody_filters_has_no_filter() -> None:
    values = sampling_values(SamplingParams(temperature=0.5, seed=4), SamplingParams(0, seed=5))
    assert values["temperatures"] == [0.5, 0] and values["seeds"] == [4, 5]
    assert values["positions"] == [3, 3]
    assert values["top_k"] is values["top_p"] is values["min_p"] is values["banned"] is None


def test_a_row_that_does_not_filter_is_switched_off_where_another_does() -> None:
    """top_k 0, -1 and anything from the vocabulary's size on mean all of it."""
    values = sampling_values(
        SamplingParams(top_k=7),
        SamplingParams(top_k=-1, top_p=0.5),
        SamplingParams(top_k=0, min_p=0.25),
        SamplingParams(top_k=100),
        SamplingParams(top_k=10**9),
    )
    assert values["top_k"] == [7, 100, 100, 100, 100]
    assert values["top_p"] == [1, 0.5, 1, 1, 1]
    assert values["min_p"] == [0, 0, 0.25, 0, 0]


@pytest.mark.parametrize(
    ("seed", "bits"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**64 - 1, -1), (-1, -1), (-(2**63),) * 2]
)
def test_seeds_are_64_bits(seed: int, bits: int) -> None:
    assert sampling_values(SamplingParams(seed=seed))["seeds"] == [bits]


def test_requests_without_a_seed_get_different_ones_and_keep_them() -> None:
    seqs = [Sequence([1]) for _ in range(100)]
    assert len({seq.seed for seq in seqs}) == 100
    first, second = (sampling_inputs(seqs, frozenset(), 9, CPU).seeds for _ in range(2))
    assert torch.equal(first, second)


def test_min_tokens_bans_what_would_end_the_request() -> None:
    """EOS ids unless they are ignored, and stop ids; of the rows that still lack tokens."""
    values = sampling_values(
        SamplingParams(temperature=0, min_tokens=1),
        SamplingParams(temperature=0, min_tokens=1, stop_token_ids=[9, 40]),
        SamplingParams(temperature=0, min_tokens=1, stop_token_ids=[40], ignore_eos=True),
        SamplingParams(temperature=0, stop_token_ids=[40]),
    )
    assert values["banned"] == [(0, 5), (0, 9), (1, 5), (1, 9), (1, 40), (2, 40)]
    seq = Sequence([1], SamplingParams(min_tokens=2))
    for expected in (True, True, False):
        banned = sampling_inputs([seq], frozenset({5}), 9, CPU).banned
        assert (banned is not None) == expected
        seq.append_token(3)
