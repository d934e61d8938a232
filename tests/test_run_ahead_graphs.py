"""The loop that runs a step ahead with CUDA graphs, on the CPU: a replay runs the captured step
again, its kernels in Triton's interpreter. Pending tokens go from step to step in the graphs'
state; results are those of the plain loop without graphs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ahead import (
    PROMPTS,
    SIXTEEN,
    Build,
    assert_equal,
    chats_of_every_kind,
    completions,
    engines_that_run_ahead,
    fail_at,
    finish_by_hand,
    plain,
)
from checkpoints import TINY_QWEN3, make_checkpoint, random_ids
from replaying import fake_capture
from resources import live_requests

from nanovllm import LLM, SamplingParams
from nanovllm.engine import prefill_graphs
from nanovllm.engine.prefill_graphs import PrefillGraphs, prefill_sizes
from nanovllm.engine.sequence import Sequence

pytest.importorskip("nanovllm.layers.sampler_kernels", reason="triton is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TQ with a row for every id of the bundled tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=2048)


@pytest.fixture
def build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Engines with graphs for up to four sequences, and for prefills of up to 32 positions."""
    if torch.cuda.is_available():
        pytest.skip("test_gpu.py has the real ones")
    fake_capture(monkeypatch)
    with engines_that_run_ahead(folder) as build_without:

        def build(path: Path = folder, **settings: int) -> LLM:
            settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, **settings}
            llm = build_without(path, **settings)
            llm.model_runner._capture_graphs(with_prefill=True)
            return llm

        yield build


def test_every_kind_of_request(build: Build) -> None:
    """Ten of them, four at a time; those that filter, ban or report do so beside the graph."""
    llm = build(TINY_QWEN3, num_kvcache_blocks=400)
    prompts, params = chats_of_every_kind(llm, rounds=1)
    reference = plain(TINY_QWEN3, prompts, params, num_kvcache_blocks=400)
    assert {output["finish_reason"] for output in reference} == {"stop", "length"}
    assert_equal(llm.generate(prompts, params, use_tqdm=False), reference)
    stats = llm.stats()
    assert stats["graph_misses"] == 0 and stats["graph_replays"] > 50


def test_the_plain_loop_with_graphs(build: Build, folder: Path) -> None:
    """`step` may use them, too."""
    llm = build()
    llm.runs_ahead = False
    params = [SamplingParams(max_tokens=9, seed=i, ignore_eos=True) for i in range(4)]
    assert_equal(llm.generate(PROMPTS, params, use_tqdm=False), plain(folder, PROMPTS, params))


def test_preemption(build: Build, folder: Path) -> None:
    """Six requests of up to 7 blocks in a pool of 9."""
    prompts = [random_ids(5 + 2 * i, seed=i) for i in range(6)]
    params = [SamplingParams(max_tokens=12 - i, seed=i, ignore_eos=True) for i in range(6)]
    llm = build(num_kvcache_blocks=9)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_equal(outputs, plain(folder, prompts, params))
    assert llm.stats()["preemptions"] >= 1


def test_requests_added_while_a_stream_is_read(build: Build, folder: Path) -> None:
    """A prefill in between, and rows that join and leave."""
    expected = [output["token_ids"] for output in plain(folder, PROMPTS, SIXTEEN)]
    llm = build()
    added = []
    increments = []
    for increment in llm.stream(PROMPTS[:1], SIXTEEN):
        increments += increment["token_ids"]
        if len(increments) % 4 == 0 and len(added) < 3:
            llm.add_request(PROMPTS[1 + len(added)], SIXTEEN)
            added.append(llm.scheduler.waiting[-1])
    finish_by_hand(llm)
    assert increments == expected[0]
    assert [seq.completion_token_ids for seq in added] == expected[1:]


@pytest.mark.parametrize("method", ["launch", "collect"])
def test_a_failed_step_leaves_nothing_in_the_graphs(
    build: Build, folder: Path, method: str
) -> None:
    """The only request fills the pool, so it comes back in the same blocks, with as many tokens as
    the failed step would have left; the ids that the device has for it are not what it gets."""
    prompt = random_ids(9)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (expected,) = plain(folder, [prompt], params)
    llm = build(num_kvcache_blocks=3)
    llm.add_request(prompt, params)
    (seq,) = llm.scheduler.waiting
    fail_at(llm, method, 2, RuntimeError)
    llm.step()
    table = list(seq.block_table)
    with pytest.raises(RuntimeError, match="made to fail"):
        llm.step()
    state = llm.model_runner.graphs.state
    with torch.inference_mode():
        state["input_ids"].fill_(7)
        state["context_lens"].fill_(len(seq) + 1)
    llm.step()
    assert seq.block_table == table
    finish_by_hand(llm)
    assert seq.completion_token_ids == expected["token_ids"]


def test_finished_requests_are_let_go(build: Build) -> None:
    """The description of the batch on the device does not keep them."""
    llm = build()
    before = live_requests()
    completions(llm, PROMPTS, SIXTEEN)
    assert live_requests() == before


# --- prefills -------------------------------------------------------------------------------------


def prefill_replays(llm: LLM) -> dict[int, int]:
    """Bucket -> how often it was replayed."""
    graphs = llm.model_runner.prefill_graphs
    return {size: graph.num_replays for size, graph in graphs.graphs.items()}


@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [([1], 32), ([32], 32), ([20, 12], 32), ([33], 64), ([40, 24], 64), ([1] * 8, 32)],
)
def test_a_short_prefill_runs_in_the_smallest_bucket(
    build: Build, folder: Path, lengths: list[int], bucket: int
) -> None:
    """Positions and sequences that fill it, and that leave some of it over."""
    prompts = [random_ids(count, seed=count) for count in lengths]
    one = SamplingParams(max_tokens=1, temperature=0)
    llm = build(max_num_seqs=8, max_num_batched_tokens=64)
    assert completions(llm, prompts, one) == [
        output["token_ids"] for output in plain(folder, prompts, one)
    ]
    assert prefill_replays(llm) == {size: int(size == bucket) for size in (64, 32)}


@pytest.mark.parametrize("case", ["history", "too many positions", "too many sequences"])
def test_other_prefills_take_the_plain_path(
    build: Build, folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk after the first or a prefix hit, more than the largest
    bucket of a step's 600 positions, more than MAX_SEQS sequences."""
    monkeypatch.setattr(prefill_graphs, "MAX_SEQS", 8)
    one = SamplingParams(max_tokens=1, temperature=0)
    prompts = {
        "history": [random_ids(30)],
        "too many positions": [random_ids(300, seed=i) for i in range(2)],
        "too many sequences": [[i] for i in range(9)],
    }[case]
    settings = {"max_num_batched_tokens": 600, "num_kvcache_blocks": 200, "max_num_seqs": 9}
    reference = [output["token_ids"] for output in plain(folder, prompts, one, **settings)]
    llm = build(**settings)
    if case == "history":
        assert completions(llm, prompts, one) == reference
        assert sum(prefill_replays(llm).values()) == 1
    assert completions(llm, prompts, one) == reference
    assert sum(prefill_replays(llm).values()) == (case == "history")


@pytest.mark.parametrize(
    ("billions", "budget", "largest"),
    [(0.6, 16384, 4096), (0.6, 600, 512), (4, 16384, 512), (8.2, 16384, 256), (32.8, 16384, 64)],
)
def test_the_larger_the_model_the_shorter_its_prefill_graphs(
    billions: float, budget: int, largest: int
) -> None:
    assert prefill_sizes(int(billions * 1e9), budget)[-1] == largest


def test_prefill_graphs_are_no_longer_than_a_step(build: Build) -> None:
    """With a budget below the smallest bucket there is none, and the engine works."""
    llm = build(max_num_batched_tokens=31)
    graphs = llm.model_runner.prefill_graphs
    assert isinstance(graphs, PrefillGraphs) and graphs.sizes == []
    assert len(completions(llm, [[1, 2, 3]], SamplingParams(max_tokens=2))[0]) == 2


@torch.inference_mode()
def test_positions_that_a_prefill_graph_has_to_spare_belong_to_a_sequence(build: Build) -> None:
    """Of id 0 and slot -1, so that attention finds no memory there that nobody has written."""
    llm = build()
    graphs = llm.model_runner.prefill_graphs
    seqs = []
    for length in (3, 9):
        seq = Sequence(list(range(1, length + 1)), block_size=llm.config.kvcache_block_size)
        seq.num_scheduled_tokens, seq.block_table = length, [*range(seq.num_blocks)]
        seqs.append(seq)
    graphs.launch(seqs)
    rest = [32] * (graphs.max_seqs - 1)
    assert graphs.inputs["cu_seqlens"].tolist() == [0, 3, 12, *rest]
    assert graphs.inputs["input_ids"].tolist()[:13] == [1, 2, 3, *range(1, 10), 0]
    assert graphs.inputs["slot_mapping"].tolist()[12:] == [-1] * (graphs.sizes[-1] - 12)
