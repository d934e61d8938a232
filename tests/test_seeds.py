"""seed: the same tokens whatever else is in the batch, and however it was cut, preempted or hit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_ids

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence


@pytest.fixture
def llm(wide_tq: Path) -> Iterator[LLM]:
    with start(wide_tq) as engine:
        yield engine


def start(folder: Path, **settings: Any) -> LLM:
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 96, **settings}
    return LLM(folder, device="cpu", **settings)


def complete(llm: LLM, prompts: list, params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


PROMPT = random_ids(23, seed=1)
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "ignore_eos": True}
SEEDED = SamplingParams(seed=7, max_tokens=16, **SAMPLED)


@pytest.fixture(scope="module")
def alone(wide_tq: Path) -> list[int]:
    """What the seeded request gives alone, whole and cold."""
    with start(wide_tq) as llm:
        (token_ids,) = complete(llm, [PROMPT], SEEDED)
    assert len(set(token_ids)) > 8, "hardly sampled"
    return token_ids


def others(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Other requests with settings of all kinds, some of them unseeded."""
    prompts = [random_ids(3 + 2 * i, seed=100 + i) for i in range(count)]
    kinds = [
        SamplingParams(max_tokens=24, **SAMPLED),
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(max_tokens=20, temperature=1.5, seed=7),
    ]
    return prompts, [kinds[i % len(kinds)] for i in range(count)]


def test_seed_alone_twice_in_one_engine(llm: LLM, alone: list[int]) -> None:
    """The second time most of the prompt is a prefix hit."""
    for _ in range(2):
        assert complete(llm, [PROMPT], SEEDED) == [alone]
    assert llm.stats()["prefix_hit_tokens"] == 20


@pytest.mark.parametrize("place", [0, 3, 7])
def test_seed_batched_with_others(llm: LLM, alone: list[int], place: int) -> None:
    prompts, params = others(7)
    prompts.insert(place, PROMPT)
    params.insert(place, SEEDED)
    assert complete(llm, prompts, params)[place] == alone


def test_seed_among_others_that_ask_for_nothing(llm: LLM, alone: list[int]) -> None:
    """No filter and no sampling beside it, so that it alone switches them on."""
    prompts, _ = others(4)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert complete(llm, [*prompts, PROMPT], [*[greedy] * 4, SEEDED])[-1] == alone


@pytest.mark.parametrize("budget", [1, 5, 8])
def test_seed_chunked(wide_tq: Path, alone: list[int], budget: int) -> None:
    """The candidates of the earlier chunks are dropped and use up no randomness."""
    with start(wide_tq, max_num_batched_tokens=budget) as llm:
        assert complete(llm, [PROMPT], SEEDED) == [alone]


def test_seed_preempted_and_resumed(wide_tq: Path, alone: list[int]) -> None:
    """By the scheduler, in a pool that is too small for all."""
    with start(wide_tq, num_kvcache_blocks=14) as llm:
        llm.scheduler.learns_headroom = False
        preempted: list[Sequence] = []
        preempt = llm.scheduler.preempt
        llm.scheduler.preempt = lambda seq: preempted.append(seq) or preempt(seq)
        prompts, params = others(5)
        assert complete(llm, [*prompts, PROMPT], [*params, SEEDED])[-1] == alone
        assert any(seq.prompt_token_ids == PROMPT for seq in preempted)


def test_seed_preempted_at_every_other_step(wide_tq: Path, alone: list[int]) -> None:
    """By hand, while its own blocks are still there to be hit."""
    with start(wide_tq) as llm:
        llm.add_request(PROMPT, SEEDED)
        (seq,) = llm.scheduler.waiting
        while not llm.is_finished():
            llm.step()
            if seq in llm.scheduler.running and len(seq) % 2:
                llm.scheduler.running.remove(seq)
                llm.scheduler.preempt(seq)
        assert seq.completion_token_ids == alone
        assert llm.stats()["prefix_hit_tokens"] > 100


def test_seed_after_a_failed_step(wide_tq: Path, alone: list[int]) -> None:
    """A step that did not happen has used up no randomness."""
    with start(wide_tq) as llm:
        run, calls = llm.model_runner.run, 0

        def flaky(*args: Any) -> list[int]:
            nonlocal calls
            calls += 1
            token_ids = run(*args)
            if calls % 3 == 0:
                raise RuntimeError("made to fail")
            return token_ids

        llm.model_runner.run = flaky
        llm.add_request(PROMPT, SEEDED)
        (seq,) = llm.scheduler.waiting
        while not llm.is_finished():
            try:
                llm.step()
            except RuntimeError:
                continue
        assert calls > 20 and seq.completion_token_ids == alone


def test_seed_as_the_end_of_a_longer_prompt_goes_on_as_before(llm: LLM, alone: list[int]) -> None:
    """Randomness belongs to the position in the request: prompt and half of the completion, given
    as a prompt with the same seed, go on with the other half."""
    assert complete(llm, [PROMPT + alone[:8]], SEEDED)[0][:8] == alone[8:]


def test_other_seeds_and_none_give_other_tokens(llm: LLM, alone: list[int]) -> None:
    seeds = [8, 2**64 - 1, -1, 7 + 2**32, None, None]
    params = [SamplingParams(seed=seed, max_tokens=16, **SAMPLED) for seed in seeds]
    results = complete(llm, [PROMPT] * 6, params)
    assert results[1] == results[2], "the same 64 bits"
    assert len({tuple(ids) for ids in (*results, alone)}) == 6
