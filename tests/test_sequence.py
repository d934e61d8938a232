"""Sequence: the record of one request, and the three lengths that must not be confused."""

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.sequence import PENDING, Sequence, SequenceStatus


def test_a_new_sequence() -> None:
    """Every field of a request that nobody has scheduled yet."""
    seq = Sequence([100, 200, 300], SamplingParams(temperature=0.5, max_tokens=7, ignore_eos=True))
    assert seq.token_ids == seq.prompt_token_ids == [100, 200, 300]
    assert seq.last_token == 300
    assert len(seq) == seq.num_tokens == seq.num_prompt_tokens == 3
    assert seq.num_cached_tokens == seq.num_scheduled_tokens == 0
    assert seq.num_completion_tokens == 0 and seq.completion_token_ids == []
    assert seq.block_table == [] and seq.num_blocks == 1 and seq.block_size == 256
    assert seq.status.name == "WAITING" and not seq.is_finished and seq.finish_reason is None
    assert (seq.temperature, seq.max_tokens, seq.ignore_eos) == (0.5, 7, True)


def test_an_accepted_token_extends_the_completion_only() -> None:
    seq = Sequence([1, 2])
    seq.append_token(9)
    seq.append_token(8)
    assert seq.token_ids == [1, 2, 9, 8] and seq.last_token == 8 and len(seq) == 4
    assert seq.prompt_token_ids == [1, 2] and seq.num_prompt_tokens == 2
    assert seq.completion_token_ids == [9, 8] and seq.num_completion_tokens == 2
    assert seq.num_cached_tokens == 0, "an accepted token has no K/V yet"


def test_without_params_the_defaults_hold() -> None:
    seq, default = Sequence([1]), SamplingParams()
    assert (seq.temperature, seq.max_tokens, seq.ignore_eos) == (
        default.temperature,
        default.max_tokens,
        default.ignore_eos,
    )


def test_seq_id_is_a_running_counter() -> None:
    first, second, third = Sequence([1]), Sequence([1]), Sequence([1])
    assert (second.seq_id, third.seq_id) == (first.seq_id + 1, first.seq_id + 2)


def test_the_callers_list_is_copied() -> None:
    prompt = [1, 2]
    seq = Sequence(prompt)
    seq.append_token(3)
    prompt.append(4)
    assert prompt == [1, 2, 4] and seq.token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("length", "num_blocks", "in_last"),
    [(1, 1, 1), (255, 1, 255), (256, 1, 256), (257, 2, 1), (512, 2, 256), (513, 3, 1)],
)
def test_example_slots_blocks_of_a_length(length: int, num_blocks: int, in_last: int) -> None:
    seq = Sequence([0] * length)
    assert seq.num_blocks == num_blocks and seq.last_block_num_tokens == in_last


def test_block_is_the_ids_of_one_logical_block() -> None:
    seq = Sequence(list(range(10)), block_size=4)
    assert [seq.block(i) for i in range(seq.num_blocks)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_engines_of_different_block_sizes_share_a_process() -> None:
    """The block size belongs to a sequence, not to the class: a second engine changes nothing."""
    first = Sequence([0] * 10, block_size=4)
    second = Sequence([0] * 10, block_size=256)
    assert (first.num_blocks, second.num_blocks) == (3, 1)


def test_status_names() -> None:
    assert [status.name for status in SequenceStatus] == ["WAITING", "RUNNING", "FINISHED"]


def test_repr_tells_where_a_request_stands() -> None:
    seq = Sequence([1, 2, 3])
    seq.block_table = [17]
    assert repr(seq) == (
        f"Sequence({seq.seq_id}, WAITING, tokens=3, cached=0, scheduled=0, block_table=[17])"
    )


def test_pending_tokens_are_no_completion_yet() -> None:
    """Two are pending while a step runs and the next one is launched."""
    seq = Sequence([1, 2])
    for token_id in (9, PENDING, PENDING):
        seq.append_token(token_id)
    assert seq.completion_token_ids == [9] and seq.num_completion_tokens == 3
