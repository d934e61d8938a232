"""stream and abort: increments as they come, and what is left behind when somebody stops early."""

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, random_ids
from invariants import check_invariants
from recording import GREEDY, script

from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import Increment

HALF = "\ufffd"
SIXTEEN = SamplingParams(max_tokens=16, **GREEDY)
PROMPTS = [random_ids(count, seed=count) for count in (9, 2, 30, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TQ with a row for every id of the bundled tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=2048)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with start(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The sixteen greedy tokens of each of PROMPTS."""
    with start(folder) as llm:
        outputs = llm.generate(PROMPTS, SIXTEEN, use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def start(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"kvcache_block_size": 4, "num_kvcache_blocks": 64, **settings})


def joined(increments: list[Increment], index: int) -> tuple[str, list[int], list[str | None]]:
    """(text, token_ids, finish reasons) of one prompt's increments, put together."""
    own = [increment for increment in increments if increment["index"] == index]
    text = "".join(increment["text"] for increment in own)
    token_ids = [token_id for increment in own for token_id in increment["token_ids"]]
    return text, token_ids, [increment["finish_reason"] for increment in own]


def assert_clean(llm: LLM, expected: list[list[int]]) -> None:
    """Nothing lives, the pool is free, and the engine gives what a fresh one gives."""
    check_invariants(llm.scheduler)
    assert llm.is_finished() and not llm.requests
    assert len(llm.scheduler.block_manager.free_block_ids) == 64
    outputs = llm.generate(PROMPTS, SIXTEEN, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == expected


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


def test_a_stream_that_nobody_reads_does_nothing(llm: LLM, expected: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS, SIXTEEN)
    assert llm.is_finished()
    stream.close()
    assert_clean(llm, expected)


# --- several callers ------------------------------------------------------------------------------


def test_two_streams_and_a_generate_in_turn(llm: LLM, expected: list[list[int]]) -> None:
    """Each caller's steps run the others' requests along; each gets its own, all of it."""
    first, second = llm.stream(PROMPTS[:2], SIXTEEN), llm.stream(PROMPTS[2:3], SIXTEEN)
    from_first = [next(first) for _ in range(4)]
    from_second = [next(second) for _ in range(3)]
    from_first.append(next(first))
    (output,) = llm.generate(PROMPTS[3:], SIXTEEN, use_tqdm=False)
    from_second += list(second)
    from_first += list(first)
    assert [joined(from_first, index)[1] for index in (0, 1)] == expected[:2]
    assert joined(from_second, 0)[1] == expected[2]
    assert output["token_ids"] == expected[3]
    assert_clean(llm, expected)


def test_a_stream_that_others_ran_to_its_end(llm: LLM, expected: list[list[int]]) -> None:
    """The rest comes in one increment, and no step is run for it."""
    stream = llm.stream(PROMPTS[:1], SIXTEEN)
    first = next(stream)
    while not llm.is_finished():
        llm.step()
    steps = llm.stats()["steps"]
    (rest,) = stream
    assert first["token_ids"] + rest["token_ids"] == expected[0]
    assert rest["finish_reason"] == "length" and llm.stats()["steps"] == steps


# --- stopping early -------------------------------------------------------------------------------

# name -> (settings, increments read before the end)
MOMENTS: dict[str, tuple[dict[str, Any], int]] = {
    "all running": ({}, 9),
    "some waiting": ({"max_num_seqs": 2, "max_num_batched_tokens": 64}, 1),
    # 9 + 2 positions of the first two, then the third's 30 in chunks of 16.
    "in the chunks of one": ({"max_num_batched_tokens": 16}, 2),
    "one finished": ({}, 4 * 3 + 2),
}


def at_moment(folder: Path, moment: str) -> tuple[LLM, Iterator[Increment]]:
    """An engine, and a stream of it that has come to this moment."""
    settings, count = MOMENTS[moment]
    llm = start(folder, **settings)
    lengths = (16, 3 if moment == "one finished" else 16, 16, 16)
    params = [SamplingParams(max_tokens=length, **GREEDY) for length in lengths]
    stream = llm.stream(PROMPTS, params)
    for _ in range(count):
        next(stream)
    if moment == "in the chunks of one":
        llm.step()
        (cut,) = [seq for seq in llm.scheduler.waiting if seq.block_table]
        assert 0 < cut.num_cached_tokens < 30
    assert bool(llm.scheduler.waiting) == (moment in ("some waiting", "in the chunks of one"))
    assert len(llm.requests) == (3 if moment == "one finished" else 4)
    return llm, stream


@pytest.mark.parametrize("moment", MOMENTS)
def test_closing_early_frees_everything(
    folder: Path, expected: list[list[int]], moment: str
) -> None:
    llm, stream = at_moment(folder, moment)
    stream.close()
    assert_clean(llm, expected)
    assert list(stream) == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_dropping_the_iterator_frees_everything(
    folder: Path, expected: list[list[int]], moment: str
) -> None:
    llm, stream = at_moment(folder, moment)
    del stream
    gc.collect()
    assert_clean(llm, expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("count", [1, 5, 30])
def test_an_exception_in_the_callers_loop(
    llm: LLM, expected: list[list[int]], count: int, error: type[BaseException]
) -> None:
    with pytest.raises(error, match="the caller's"):
        for i, _ in enumerate(llm.stream(PROMPTS, SIXTEEN), start=1):
            if i == count:
                raise error("the caller's")
    assert_clean(llm, expected)


def test_an_exception_while_the_stream_has_a_name(llm: LLM, expected: list[list[int]]) -> None:
    """The traceback keeps it alive; `closing` is how a caller makes sure."""
    with pytest.raises(ValueError), closing(llm.stream(PROMPTS, SIXTEEN)) as stream:
        for _ in stream:
            raise ValueError
    assert_clean(llm, expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", [1, 2, 9])
def test_case_38_an_exception_in_the_runner(
    llm: LLM, expected: list[list[int]], step: int, error: type[BaseException]
) -> None:
    """It comes out of `next`, after which the stream is over."""
    run, calls = llm.model_runner.run, 0

    def failing(*args: Any) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == step:
            raise error("made to fail")
        return run(*args)

    llm.model_runner.run = failing
    stream = llm.stream(PROMPTS, SIXTEEN)
    increments = []
    with pytest.raises(error, match="made to fail"):
        for increment in stream:
            increments.append(increment)
    assert len(increments) == 4 * (step - 1) and list(stream) == []
    assert_clean(llm, expected)


def test_exit_while_streaming(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, SIXTEEN)
    for _ in range(4):
        next(stream)
    llm.exit()
    with pytest.raises(RuntimeError, match="exited"):
        next(stream)
    with pytest.raises(RuntimeError, match="exited"):
        llm.stream(PROMPTS, SIXTEEN)


# --- abort ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["waiting", "prefilling in chunks", "running", "last step"])
def test_abort_of_an_added_request(folder: Path, expected: list[list[int]], moment: str) -> None:
    """Its blocks are free at once, and the other requests end as if it had never been."""
    with start(folder, max_num_batched_tokens=16) as llm:
        other = llm.add_request(PROMPTS[0], SIXTEEN)
        (other_seq,) = llm.scheduler.waiting
        llm.step()
        request_id = llm.add_request(PROMPTS[2], SIXTEEN)
        seq = llm.scheduler.waiting[-1]
        steps = {"waiting": 0, "prefilling in chunks": 1, "running": 4, "last step": 2 + 14}
        for _ in range(steps[moment]):
            llm.step()
        assert (seq.status.name, bool(seq.block_table)) == {
            "waiting": ("WAITING", False),
            "prefilling in chunks": ("WAITING", True),
        }.get(moment, ("RUNNING", True))
        free = len(llm.scheduler.block_manager.free_block_ids)
        held = len(seq.block_table)
        assert llm.abort(request_id) is True
        check_invariants(llm.scheduler)
        assert len(llm.scheduler.block_manager.free_block_ids) == free + held
        assert (seq.finish_reason, seq.block_table, seq.is_finished) == ("abort", [], True)
        finished = []
        while not llm.is_finished():
            finished += llm.step()[0]
        assert request_id not in dict(finished)
        assert other_seq.completion_token_ids == expected[0]
        assert other in dict(finished)
        assert_clean(llm, expected)


def test_abort_of_what_is_not_live(llm: LLM) -> None:
    """Finished, aborted before, never added: False, and nothing happens."""
    done = llm.add_request([1], SamplingParams(max_tokens=1, **GREEDY))
    llm.step()
    live = llm.add_request([1], SIXTEEN)
    assert llm.abort(done) is False and llm.abort(10**9) is False
    assert llm.abort(live) is True and llm.abort(live) is False
    assert llm.is_finished()


@pytest.mark.parametrize("after", [1, 6])
def test_abort_of_one_of_a_streams_requests(
    llm: LLM, expected: list[list[int]], after: int
) -> None:
    """It ends with the reason "abort" and what it had; the others go on to their ends."""
    increments = []
    for increment in llm.stream(PROMPTS, SIXTEEN):
        increments.append(increment)
        if len(increments) == after:
            request_id = next(i["request_id"] for i in increments if i["index"] == 0)
            assert llm.abort(request_id)
    text, token_ids, reasons = joined(increments, 0)
    assert reasons[-1] == "abort" and "abort" not in reasons[:-1]
    assert token_ids == expected[0][: len(token_ids)] and len(token_ids) == -(-after // 4)
    assert text == llm.tokenizer.decode(token_ids, skip_special_tokens=True)
    for index in (1, 2, 3):
        _, token_ids, reasons = joined(increments, index)
        assert (token_ids, reasons[-1]) == (expected[index], "length")
    assert_clean(llm, expected)


def test_abort_of_all_of_a_streams_requests_ends_it(llm: LLM, expected: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS, SIXTEEN)
    next(stream)
    for request_id in list(llm.requests):
        llm.abort(request_id)
    assert [increment["finish_reason"] for increment in stream] == ["abort"] * 4
    assert_clean(llm, expected)


def test_abort_in_the_middle_of_generate(llm: LLM, expected: list[list[int]]) -> None:
    """By whoever has a foot in the loop: generate ends all the same, with what there was."""
    step = llm.step

    def step_then_abort() -> Any:
        result = step()
        if llm.stats()["steps"] == 7:
            assert llm.abort(min(llm.requests))
        return result

    llm.step = step_then_abort
    outputs = llm.generate(PROMPTS, SIXTEEN, use_tqdm=False)
    assert [output["finish_reason"] for output in outputs] == ["abort", *["length"] * 3]
    assert outputs[0]["token_ids"] == expected[0][:7]
    assert [output["token_ids"] for output in outputs[1:]] == expected[1:]
    assert_clean(llm, expected)
