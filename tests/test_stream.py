"""stream: increments as they come, put together the completion, and never half a character."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recording import GREEDY, script
from streaming import PROMPTS, SIXTEEN, assert_clean, joined, start_small

from nanovllm import LLM, SamplingParams

HALF = "\ufffd"


@pytest.fixture
def llm(wide_tq: Path) -> Iterator[LLM]:
    with start_small(wide_tq) as engine:
        yield engine


# --- increments -----------------------------------------------------------------------------------


def test_increments_put_together_are_what_generate_gives(llm: LLM) -> None:
    """Ids, text and finish reason, for prompts of different lengths and ends. Random ids are rich
    in bytes that are no character."""
    params = [
        SamplingParams(max_tokens=20, **GREEDY),
        SamplingParams(max_tokens=1, **GREEDY),
        SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, seed=6, top_k=40),
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    increments = list(llm.stream(PROMPTS, params))
    for index, output in enumerate(outputs):
        text, token_ids, reasons = joined(increments, index)
        assert text == output["text"] == llm.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert token_ids == output["token_ids"]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] == output["finish_reason"]
    assert len({increment["request_id"] for increment in increments}) == 4


def test_increments_come_token_by_token(llm: LLM) -> None:
    """The first after the prefill step, then one token of each prompt per step."""
    stream = llm.stream(PROMPTS[:2], SamplingParams(max_tokens=3, **GREEDY))
    assert llm.stats()["steps"] == 0, "nothing runs before it is asked for"
    steps = [(next(stream)["index"], llm.stats()["steps"]) for _ in range(6)]
    assert steps == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
    assert list(stream) == []


def test_one_text_is_one_prompt(llm: LLM) -> None:
    (output,) = llm.generate(["To be"], SIXTEEN, use_tqdm=False)
    text, token_ids, _ = joined(list(llm.stream("To be", SIXTEEN)), 0)
    assert (text, token_ids) == (output["text"], output["token_ids"])


@pytest.mark.parametrize("text", ["aé€😀b", "😀😀", "To be€"])
def test_never_half_a_character(llm: LLM, text: str) -> None:
    ids = llm.tokenizer.encode(text)
    assert len(ids) > 3
    script(llm, lambda seq: ids[seq.num_completion_tokens])
    increments = list(llm.stream([[1]], SamplingParams(max_tokens=len(ids))))
    assert all(HALF not in increment["text"] for increment in increments)
    assert joined(increments, 0)[:2] == (text, ids)
    assert len(increments) == len(ids), "ids come with their step, also without text"


def test_a_completion_that_ends_in_half_a_character(llm: LLM) -> None:
    """Cut by max_tokens: the last increment has what the tokenizer makes of it."""
    ids = llm.tokenizer.encode("a😀")[:-1]
    script(llm, lambda seq: ids[seq.num_completion_tokens])
    increments = list(llm.stream([[1]], SamplingParams(max_tokens=len(ids))))
    assert [increment["text"] for increment in increments] == ["a", "", "", HALF]
    assert llm.tokenizer.decode(ids) == f"a{HALF}"


def test_nothing_of_a_stop_string_is_shown(llm: LLM) -> None:
    """What may be its beginning waits; it comes after all if it was not."""
    ids = llm.tokenizer.encode("To be, or not to be")
    script(llm, lambda seq: ids[seq.num_completion_tokens])
    increments = list(llm.stream([[1]], SamplingParams(max_tokens=7, stop=[", or to", "t to b"])))
    texts = [increment["text"] for increment in increments]
    assert texts == ["To", " be", "", "", ", or no", "", ""]
    assert joined(increments, 0)[1:] == (ids, [None] * 6 + ["stop"])


@pytest.mark.parametrize(
    ("prompts", "params", "error", "match"),
    [
        ([[1], []], None, ValueError, "prompt 1: the prompt has no token ids"),
        ([], None, ValueError, "prompts is empty"),
        ([[1], [2]], [SIXTEEN], ValueError, "2 prompts but 1 sampling_params"),
        ([[1]], 3, TypeError, "sampling_params must be"),
        ([[1], "\ud800"], None, ValueError, "prompt 1: the text .* cannot be tokenized"),
    ],
)
def test_bad_input_raises_at_the_call(
    llm: LLM, prompts: Any, params: Any, error: type[Exception], match: str
) -> None:
    """Not at the first `next`, which may be far away."""
    with pytest.raises(error, match=match):
        llm.stream(prompts, params)
    assert llm.is_finished() and not llm.requests


def test_a_stream_that_nobody_reads_does_nothing(llm: LLM, sixteen_greedy: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS, SIXTEEN)
    assert llm.is_finished()
    stream.close()
    assert_clean(llm, sixteen_greedy)


def test_a_request_that_ended_without_a_word(llm: LLM, sixteen_greedy: list[list[int]]) -> None:
    """Its scheduler's doing, or a step that failed in the midst of telling: no waiting for more."""
    stream = llm.stream(PROMPTS[:2], SIXTEEN)
    increments = [next(stream) for _ in range(2)]
    for seq in list(llm.scheduler.running):
        llm.scheduler.abort(seq)
    increments += stream
    assert [increment["finish_reason"] for increment in increments] == [
        None,
        None,
        "abort",
        "abort",
    ]
    assert_clean(llm, sixteen_greedy)


# --- several callers ------------------------------------------------------------------------------


def test_two_streams_and_a_generate_in_turn(llm: LLM, sixteen_greedy: list[list[int]]) -> None:
    """Each caller's steps run the others' requests along; each gets its own, all of it."""
    first, second = llm.stream(PROMPTS[:2], SIXTEEN), llm.stream(PROMPTS[2:3], SIXTEEN)
    from_first = [next(first) for _ in range(4)]
    from_second = [next(second) for _ in range(3)]
    from_first.append(next(first))
    (output,) = llm.generate(PROMPTS[3:], SIXTEEN, use_tqdm=False)
    from_second += list(second)
    from_first += list(first)
    assert [joined(from_first, index)[1] for index in (0, 1)] == sixteen_greedy[:2]
    assert joined(from_second, 0)[1] == sixteen_greedy[2]
    assert output["token_ids"] == sixteen_greedy[3]
    assert_clean(llm, sixteen_greedy)


def test_a_stream_that_others_ran_to_its_end(llm: LLM, sixteen_greedy: list[list[int]]) -> None:
    """The rest comes in one increment, and no step is run for it."""
    stream = llm.stream(PROMPTS[:1], SIXTEEN)
    first = next(stream)
    while not llm.is_finished():
        llm.step()
    steps = llm.stats()["steps"]
    (rest,) = stream
    assert first["token_ids"] + rest["token_ids"] == sixteen_greedy[0]
    assert rest["finish_reason"] == "length" and llm.stats()["steps"] == steps
