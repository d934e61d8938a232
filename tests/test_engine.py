"""LLM on CPU: what `generate`, `add_request` and `step` promise to their callers."""

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, random_ids, write_json
from recording import GREEDY, Watch, add, script

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler

OWN_EOS = 2047  # what the bundled tokenizer calls its end of sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TQ with a row for every id of the bundled tokenizer, and no generation_config.json."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=2048)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with start(folder) as engine:
        yield engine


def start(folder: Path, **settings: Any) -> LLM:
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 64, **settings}
    return LLM(folder, device="cpu", **settings)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **GREEDY)


def completions(llm: LLM, prompts: list, params: Any) -> list[list[int]]:
    return [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]


# --- generate -------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts(folder: Path, llm: LLM) -> None:
    """The first prompt is the last to finish; each gets what it would get alone."""
    prompts = [random_ids(count, seed=count) for count in (9, 2, 30, 5)]
    params = [greedy(count) for count in (12, 1, 3, 7)]
    together = completions(llm, prompts, params)
    assert [len(ids) for ids in together] == [12, 1, 3, 7]
    for prompt, one, ids in zip(prompts, params, together, strict=True):
        with start(folder) as fresh:
            assert completions(fresh, [prompt], one) == [ids]
    assert len({tuple(ids) for ids in together}) == 4


def test_one_sampling_params_serves_all(llm: LLM) -> None:
    assert [len(ids) for ids in completions(llm, [[1], [2, 3], [4]], greedy(5))] == [5, 5, 5]


def test_each_prompt_has_its_own_params(llm: LLM) -> None:
    """One batch of a greedy and a sampled request: the greedy one is not disturbed."""
    prompt = random_ids(6)
    (alone,) = completions(llm, [prompt], greedy(16))
    hot = SamplingParams(temperature=100.0, max_tokens=16, ignore_eos=True)
    first, sampled, last = completions(llm, [prompt] * 3, [greedy(16), hot, greedy(16)])
    assert first == last == alone
    assert sampled != alone


def test_temperature_0_is_deterministic_and_1_is_not(llm: LLM) -> None:
    prompt = random_ids(6)
    assert completions(llm, [prompt], greedy(16)) == completions(llm, [prompt], greedy(16))
    sampled = completions(llm, [prompt] * 4, SamplingParams(max_tokens=16, ignore_eos=True))
    assert len({tuple(ids) for ids in sampled}) == 4


def test_texts_and_ids_and_a_single_text(llm: LLM) -> None:
    text = "To be, or not to be"
    ids = llm.tokenizer.encode(text)
    both = completions(llm, [text, ids], greedy(8))
    assert both[0] == both[1]
    assert completions(llm, text, greedy(8)) == both[:1]


def test_default_params_are_those_of_sampling_params(llm: LLM) -> None:
    script(llm, lambda seq: 7)
    assert completions(llm, [[1, 2]], None) == [[7] * 64]


def test_a_callers_prompt_is_not_changed(llm: LLM) -> None:
    prompt = random_ids(5)
    before = list(prompt)
    llm.generate([prompt], greedy(4), use_tqdm=False)
    assert prompt == before


def test_text_is_the_completion_without_special_tokens(llm: LLM) -> None:
    """token_ids keep the final end-of-sequence id; text shows no special token."""
    words = llm.tokenizer.encode("my lord")
    emitted = [*words, llm.tokenizer.convert_tokens_to_ids("<|im_start|>"), OWN_EOS]
    script(llm, lambda seq: emitted[seq.num_completion_tokens])
    (output,) = llm.generate(["Good morrow,"], use_tqdm=False)
    assert (output["text"], output["finish_reason"]) == ("my lord", "stop")
    assert output["token_ids"] == emitted and output["logprobs"] is None
    assert output["text"] == llm.tokenizer.decode(emitted, skip_special_tokens=True)


def test_progress_bar_shows_both_speeds(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1, 2], [3]], greedy(3), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert re.search(r"Prefill=\d+tok/s, Decode=\d+tok/s", shown), shown


def test_progress_bar_counts_this_calls_requests_only(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request added before finishes during the call."""
    add(llm, [9], max_tokens=2)
    llm.generate([[1, 2]], greedy(5))
    assert llm.scheduler.is_finished()
    shown = capsys.readouterr().err
    assert "1/1" in shown and "2/1" not in shown


def test_use_tqdm_false_prints_nothing(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1, 2], [3]], greedy(3), use_tqdm=False)
    assert capfd.readouterr() == ("", "")


# --- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "stops", "goes_on"),
    [
        ([5, 9], [5, 9, OWN_EOS], [6]),
        (5, [5, OWN_EOS], [9]),
        (None, [OWN_EOS], [5, 9]),
    ],
)
def test_case_26_eos_ids_of_generation_config_and_tokenizer(
    tmp_path: Path, listed: Any, stops: list[int], goes_on: list[int]
) -> None:
    """generation_config.json names a list, one id, or is absent; the tokenizer's id always
    counts. The id that stopped is the last of token_ids."""
    make_checkpoint(tmp_path, vocab_size=2048)
    if listed is not None:
        write_json(tmp_path / "generation_config.json", {"eos_token_id": listed})
    with start(tmp_path) as llm:
        for eos in stops:
            script(llm, lambda seq, eos=eos: 300 if seq.num_completion_tokens < 2 else eos)
            (output,) = llm.generate([[1]], SamplingParams(max_tokens=6), use_tqdm=False)
            assert (output["token_ids"], output["finish_reason"]) == ([300, 300, eos], "stop")
            ignoring = SamplingParams(max_tokens=6, ignore_eos=True)
            (output,) = llm.generate([[1]], ignoring, use_tqdm=False)
            assert output["token_ids"] == [300, 300, eos, eos, eos, eos]
            assert output["finish_reason"] == "length"
        for token_id in goes_on:
            script(llm, lambda seq, token_id=token_id: token_id)
            (output,) = llm.generate([[1]], SamplingParams(max_tokens=6), use_tqdm=False)
            assert output["token_ids"] == [token_id] * 6
            assert output["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "count"), [(63, 9, 1), (60, 4, 4), (60, 9, 4)]
)
def test_case_06_prompt_and_completion_never_exceed_max_model_len(
    folder: Path, prompt_len: int, max_tokens: int, count: int
) -> None:
    """The last token needs no slot: at 64 positions the table stays within 16 blocks of 4."""
    with start(folder, max_model_len=64, num_kvcache_blocks=16) as llm:
        watch = Watch(llm)
        seq = add(llm, random_ids(prompt_len), max_tokens=max_tokens)
        steps = watch.run()
        assert (seq.num_completion_tokens, seq.finish_reason) == (count, "length")
        assert max(step.positions[-1] for step in steps) == prompt_len + count - 2
        (output,) = llm.generate([random_ids(prompt_len)], greedy(max_tokens), use_tqdm=False)
        assert (len(output["token_ids"]), output["finish_reason"]) == (count, "length")


def test_max_model_len_is_cut_to_the_models(folder: Path) -> None:
    """TQ has 512 positions; a table of rotary angles ends there."""
    with start(folder, max_model_len=4096, num_kvcache_blocks=200) as llm:
        assert llm.config.max_model_len == 512
        assert len(completions(llm, [random_ids(509)], greedy(20))[0]) == 3


# --- add_request and step -------------------------------------------------------------------------


def test_a_request_added_between_steps_joins_at_the_next(folder: Path, llm: LLM) -> None:
    """Continuous batching: the newcomer prefills alone, then all decode together; each gets what
    it would get alone."""
    watch = Watch(llm)
    first = add(llm, random_ids(6, seed=1), max_tokens=8)
    second = add(llm, random_ids(3, seed=2), max_tokens=8)
    watch.step()
    watch.step()
    third = add(llm, random_ids(5, seed=3), max_tokens=4)
    assert watch.step().seqs == [third]
    assert watch.step().seqs == [first, second, third]
    watch.run()
    for seq in (first, second, third):
        with start(folder) as fresh:
            alone = completions(fresh, [seq.prompt_token_ids], greedy(seq.max_tokens))
        assert alone == [seq.completion_token_ids]


def test_case_03_nobody_starves_beyond_max_num_seqs(folder: Path) -> None:
    """max_num_seqs 2, the third request added while two decode: no step runs more than two, and
    all three get all their tokens."""
    with start(folder, max_num_seqs=2) as llm:
        watch = Watch(llm)
        seqs = [add(llm, random_ids(4, seed=i), max_tokens=6) for i in range(2)]
        watch.step()
        watch.step()
        seqs.append(add(llm, random_ids(4, seed=2), max_tokens=6))
        watch.run()
        assert max(len(step.seqs) for step in watch.steps) == 2
        assert [seq.num_completion_tokens for seq in seqs] == [6, 6, 6]


def test_step_of_an_idle_engine_does_nothing(llm: LLM) -> None:
    assert llm.is_finished()
    assert llm.step() == ([], 0)
    llm.generate([[1]], greedy(2), use_tqdm=False)
    assert llm.is_finished()
    assert llm.step() == ([], 0)


def test_step_returns_every_finished_request_of_the_step(llm: LLM) -> None:
    script(llm, lambda seq: 40 + seq.num_prompt_tokens)
    ids = [llm.add_request([1] * count, greedy(count)) for count in (1, 2, 2)]
    assert llm.step() == ([(ids[0], [41])], 5)
    assert llm.step() == ([(ids[1], [42, 42]), (ids[2], [42, 42])], -2)
    assert llm.is_finished()


def test_generate_finishes_while_an_added_request_goes_on(folder: Path, llm: LLM) -> None:
    """`generate` returns its own prompts' results only, and leaves the other request alive."""
    other = add(llm, random_ids(5, seed=1), max_tokens=30)
    assert [len(ids) for ids in completions(llm, [random_ids(7)], greedy(4))] == [4]
    assert list(llm.scheduler.running) == [other]
    while not llm.is_finished():
        llm.step()
    with start(folder) as fresh:
        alone = completions(fresh, [other.prompt_token_ids], greedy(30))
    assert alone == [other.completion_token_ids]


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain loop", "ahead"])
def test_a_scheduler_of_ones_own(llm: LLM, runs_ahead: bool) -> None:
    """It may be exchanged between two jobs; both loops then run it."""

    class Shortest(Scheduler):
        def schedule(self) -> ScheduledBatch:
            self.waiting = deque(sorted(self.waiting, key=len))
            return super().schedule()

    script(llm, lambda seq: 40 + seq.num_prompt_tokens)
    before, own = llm.scheduler, Shortest(llm.config, 64, [])
    llm.scheduler, llm.runs_ahead = own, runs_ahead
    assert completions(llm, [[1] * 3, [1]], greedy(2)) == [[43] * 2, [41] * 2]
    assert llm.stats()["steps"] == own.num_steps > 0 == before.num_steps
    llm.add_request([1], greedy(1))
    assert own.waiting and not llm.is_finished()
    assert [ids for _, ids in llm.step()[0]] == [[41]] and llm.is_finished()


@pytest.mark.parametrize("loop", ["generate", "stream", "closed stream"])
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain loop", "ahead"])
def test_step_reports_what_ended_during_a_loop(llm: LLM, loop: str, runs_ahead: bool) -> None:
    """No completion of an added request is lost: the next step tells it, once, beside its own."""
    llm.runs_ahead = runs_ahead
    script(llm, lambda seq: 40 + seq.num_prompt_tokens)
    short = [llm.add_request([1] * count, greedy(count)) for count in (1, 2)]
    long = llm.add_request([1] * 3, greedy(10))
    if loop == "generate":
        assert completions(llm, [[1] * 4], greedy(5)) == [[44] * 5]
    else:
        stream = llm.stream([[1] * 4], greedy(5 if loop == "stream" else 50))
        for _ in range(5):
            next(stream)
        stream.close()
    done = len(llm.scheduler.running[0].completion_token_ids)
    finished, num_tokens = llm.step()
    assert finished == [(short[0], [41]), (short[1], [42, 42])] and num_tokens == -1
    for _ in range(10 - done - 2):
        assert not llm.is_finished()
        assert llm.step() == ([], -1)
    assert llm.step() == ([(long, [43] * 10)], -1)
    assert llm.is_finished()


def test_step_reports_also_when_nothing_is_left_to_run(llm: LLM) -> None:
    script(llm, lambda seq: 40 + seq.num_prompt_tokens)
    added = llm.add_request([1], greedy(2))
    aborted = llm.add_request([1], greedy(20))
    completions(llm, [[1, 1]], greedy(5))
    llm.abort(aborted)
    assert not llm.is_finished()
    assert llm.step() == ([(added, [41, 41])], 0)
    assert llm.is_finished() and llm.step() == ([], 0)


def test_case_09_a_repeated_prompt_gives_the_same_tokens(llm: LLM) -> None:
    """8 ids in blocks of 4, twice: the second run takes 4 from the cache and computes 4."""
    watch = Watch(llm)
    prompt = random_ids(8)
    first = add(llm, prompt, max_tokens=6)
    watch.run()
    second = add(llm, prompt, max_tokens=6)
    assert watch.step().positions == [4, 5, 6, 7]
    watch.run()
    assert second.completion_token_ids == first.completion_token_ids


def test_case_14_equal_prompts_in_one_step_and_once_more(llm: LLM) -> None:
    """Two equal 9-id prompts do not hit each other; the third hits both full blocks."""
    watch = Watch(llm)
    prompt = random_ids(9)
    twins = [add(llm, prompt, max_tokens=5) for _ in range(2)]
    assert watch.step().num_tokens == 18
    watch.run()
    third = add(llm, prompt, max_tokens=5)
    assert watch.step().positions == [8]
    watch.run()
    assert twins[0].completion_token_ids == twins[1].completion_token_ids
    assert third.completion_token_ids == twins[0].completion_token_ids


def test_case_18_a_request_that_is_not_chosen_holds_no_blocks(folder: Path) -> None:
    """Budget 8: the first leaves 2 and the second, which needs 5, is not cut."""
    with start(folder, max_num_batched_tokens=8) as llm:
        watch = Watch(llm)
        first = add(llm, random_ids(6, seed=1), max_tokens=3)
        second = add(llm, random_ids(5, seed=2), max_tokens=3)
        assert watch.step().seqs == [first]
        assert (second.block_table, second.status.name) == ([], "WAITING")
        watch.run()
        assert second.num_completion_tokens == 3
