"""The loop that runs a step ahead gives what the plain loop gives: the bundled model and a random
one, on the CPU, where it is switched on by hand; and it overlaps steps without waste."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ahead import (
    BLOCK_SIZE,
    PROMPTS,
    SIXTEEN,
    Build,
    assert_equal,
    chats_of_every_kind,
    completions,
    engines_that_run_ahead,
    plain,
)
from checkpoints import TINY_QWEN3, make_checkpoint, random_ids
from invariants import chain_hashes
from recording import GREEDY
from resources import live_requests

from nanovllm import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TQ with a row for every id of the bundled tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=2048)


@pytest.fixture
def build(folder: Path) -> Iterator[Build]:
    with engines_that_run_ahead(folder) as build:
        yield build


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The sixteen greedy tokens of each of PROMPTS."""
    return [output["token_ids"] for output in plain(folder, PROMPTS, SIXTEEN)]


# --- the same results -----------------------------------------------------------------------------


def test_every_kind_of_request_in_one_batch(build: Build) -> None:
    """They end at many different lengths, by EOS and by all other rules."""
    llm = build(TINY_QWEN3, num_kvcache_blocks=400)
    prompts, params = chats_of_every_kind(llm, rounds=2)
    reference = plain(TINY_QWEN3, prompts, params, num_kvcache_blocks=400)
    reasons = [output["finish_reason"] for output in reference]
    assert reasons.count("stop") >= 8 and reasons.count("length") >= 6
    assert any(output["token_ids"][-1] == 2047 for output in reference)
    assert any(output["text"] and output["text"].endswith("a ") for output in reference)
    assert_equal(llm.generate(prompts, params, use_tqdm=False), reference)
    # Again, now with prefix hits.
    assert_equal(llm.generate(prompts, params, use_tqdm=False), reference)
    assert llm.stats()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 32, "max_num_seqs": 2},
        {"max_num_seqs": 1},
        {"max_model_len": 33},
    ],
    ids=str,
)
def test_chunks_waiting_and_the_longest_model_len(
    build: Build, folder: Path, settings: dict[str, int]
) -> None:
    """Chunked prefill; more requests than fit into a step; a prompt of 30 with room for 3."""
    assert_equal(
        build(**settings).generate(PROMPTS, SIXTEEN, use_tqdm=False),
        plain(folder, PROMPTS, SIXTEEN, **settings),
    )


@pytest.mark.parametrize("learns_headroom", [False, True])
def test_preemption_in_a_small_pool(build: Build, folder: Path, learns_headroom: bool) -> None:
    """Twelve requests of up to 11 blocks in a pool of 16. A step that needs a preemption waits for
    the tokens in flight."""
    prompts = [random_ids(5 + 2 * i, seed=i) for i in range(12)]
    params = [SamplingParams(max_tokens=18 - i, seed=i, ignore_eos=True) for i in range(12)]
    llm = build(num_kvcache_blocks=16, max_num_seqs=6)
    llm.scheduler.learns_headroom = learns_headroom
    assert_equal(
        llm.generate(prompts, params, use_tqdm=False),
        plain(folder, prompts, params, num_kvcache_blocks=256),
    )
    assert llm.stats()["preemptions"] >= 1


def test_stop_in_the_middle_of_a_block_and_at_its_edges(build: Build, folder: Path) -> None:
    """A stop id as completion token 3 to 8 of a 5-id prompt, in blocks of 4: the position computed
    too much is the first of a block, in the middle, or its last. Then the pool is used again."""
    prompt = random_ids(5)
    (full,) = plain(folder, [prompt], SIXTEEN)
    ids = full["token_ids"]
    llm = build()
    for count in range(3, 9):
        assert ids[count - 1] not in ids[: count - 1]
        params = SamplingParams(max_tokens=16, stop_token_ids=[ids[count - 1]], **GREEDY)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert (output["token_ids"], output["finish_reason"]) == (ids[:count], "stop")
        # What the position computed too much would have filled is not in the prefix index.
        index = llm.scheduler.block_manager.hash_to_block_id
        assert index.keys() <= set(chain_hashes((prompt + ids[:count])[:-1], BLOCK_SIZE))
    assert completions(llm, [prompt], SIXTEEN) == [ids]


def test_the_prefix_index_is_the_plain_loops(build: Build, folder: Path) -> None:
    """Every block that the plain loop registers, and no other."""
    params = [
        SamplingParams(max_tokens=m, stop_token_ids=stop, **GREEDY)
        for m, stop in ((16, []), (7, []), (16, [*range(0, 2048, 5)]), (16, [*range(0, 2048, 9)]))
    ]
    llm = build()
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert {output["finish_reason"] for output in outputs} == {"stop", "length"}
    hashes = [
        chain_hashes((prompt + output["token_ids"])[:-1], BLOCK_SIZE)
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    index = llm.scheduler.block_manager.hash_to_block_id
    assert index.keys() == {digest for chain in hashes for digest in chain}


# --- what runs when -------------------------------------------------------------------------------


def test_a_step_is_launched_before_the_one_before_it_is_collected(build: Build) -> None:
    """And no further: at most two are on their way. The last is collected without another."""
    llm = build()
    calls: list[str] = []
    runner_call = llm.model_runner.call
    llm._run_ahead.runner = llm.model_runner
    llm.model_runner.call = lambda method, *args: calls.append(method) or runner_call(method, *args)
    assert len(completions(llm, [[1, 2, 3]], SamplingParams(max_tokens=5, **GREEDY))[0]) == 5
    calls = [method for method in calls if method != "check"]
    assert calls == ["launch", *["launch", "collect"] * 4, "collect"]


def test_nothing_is_computed_too_much_where_the_length_is_known(build: Build) -> None:
    """max_tokens 1, 2 and 5, and max_model_len: as many positions as the plain loop computes."""
    llm = build(max_model_len=32)
    params = [SamplingParams(max_tokens=count, **GREEDY) for count in (5, 2, 16, 1)]
    outputs = completions(llm, PROMPTS, params)
    assert [len(ids) for ids in outputs] == [5, 2, 2, 1]
    assert llm.stats()["prefill_tokens"] == 9 + 2 + 30 + 5
    assert llm.stats()["decode_tokens"] == 4 + 1 + 1 + 0


def test_an_early_end_wastes_one_position(build: Build, expected: list[list[int]]) -> None:
    """The first request stops by an id at its fourth token; the other goes on."""
    llm = build()
    stop = SamplingParams(max_tokens=16, stop_token_ids=[expected[0][3]], **GREEDY)
    outputs = completions(llm, PROMPTS[:2], [stop, SIXTEEN])
    assert outputs == [expected[0][:4], expected[1]]
    assert llm.stats()["decode_tokens"] == (3 + 1) + 15


def test_the_progress_bar_reaches_its_end(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    build().generate(PROMPTS, SIXTEEN, use_tqdm=True)
    assert "4/4" in capsys.readouterr().err


def test_finished_requests_are_let_go(build: Build) -> None:
    llm = build()
    before = live_requests()
    completions(llm, PROMPTS, SIXTEEN)
    assert live_requests() == before
