"""The whole fast path on the CPU: every fused kernel in Triton's interpreter, in graphs that are
replayed by running their steps again, in the loop that runs ahead. Against the plain path."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ahead import PROMPTS, Build, assert_equal, completions, engines_that_run_ahead, plain
from checkpoints import make_checkpoint, random_ids
from replaying import fake_capture

from nanovllm import LLM, SamplingParams
from nanovllm.layers import kernels

pytest.importorskip("nanovllm.layers.decode_attention", reason="triton is not installed")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py is its like"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # the interpreter's integers wrap
]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TQ with sizes that are no powers of two, and a row for every id of the tokenizer; with biases
    unless a test asks for none."""
    shape = {"vocab_size": 2048, "head_dim": 24, "intermediate_size": 600}
    shape["attention_bias"] = getattr(request, "param", True)
    return make_checkpoint(tmp_path_factory.mktemp("model"), **shape)


@pytest.fixture
def build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Engines that take their tensors for such as Triton serves."""
    fake_capture(monkeypatch)
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    with engines_that_run_ahead(folder) as build_without:

        def build(**settings: Any) -> LLM:
            settings = {"max_num_seqs": 3, "max_num_batched_tokens": 32, **settings}
            return build_without(folder, **settings)

        yield build


def reference(
    folder: Path, prompts: list[list[int]], params: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """What the plain path gives."""
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "usable", lambda x: False)
        return plain(folder, prompts, params)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_of_the_fast_path(
    build: Build, folder: Path, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled and filtered; whole prompts and chunks; rows that leave and join; at the end
    a prefix hit."""
    prompts = [*PROMPTS[:3], random_ids(50, seed=50)]
    params = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        SamplingParams(seed=1, max_tokens=4),
        SamplingParams(temperature=0, max_tokens=3, logprobs=2),
        SamplingParams(seed=2, max_tokens=3, top_k=10),
    ]
    expected = reference(folder, prompts, params, monkeypatch)
    llm = build(enforce_eager=enforce_eager)
    assert_equal(llm.generate(prompts, params, use_tqdm=False), expected)
    assert_equal(llm.generate(prompts[2:3], params[2], use_tqdm=False), expected[2:3])
    stats = llm.stats()
    assert stats["prefix_hit_tokens"] == 28
    assert bool(stats["graph_misses"]) == enforce_eager == (not stats["graph_replays"])


def test_preemption_on_the_fast_path(
    build: Build, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_ids(5 + i, seed=i) for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = reference(folder, prompts, params, monkeypatch)
    llm = build(num_kvcache_blocks=6)
    assert_equal(llm.generate(prompts, params, use_tqdm=False), expected)
    assert llm.stats()["preemptions"] >= 1


@pytest.mark.parametrize("folder", [False], indirect=True, ids=["no biases"])
def test_half_precision_takes_the_few_row_products(
    build: Build, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float16, whose products the kernels for few rows do. Of several: plain, with SiLU and
    split; of one: plain, with the norm inside, with norm and SiLU. The same greedy tokens, and
    log-probabilities within its rounding."""
    from nanovllm.layers import few_rows

    kinds: set[str] = set()
    few, one = few_rows.few_rows_linear, few_rows.one_row_linear

    def noted_few(x: torch.Tensor, *args: Any, silu: bool = False) -> torch.Tensor:
        out = few(x, *args, silu=silu)
        kind = "several, silu" if silu else "split" if out.dim() == 3 else "several"
        kinds.update([] if len(x) == 1 else [kind])
        return out

    def noted_one(*args: Any, **out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kinds.add("one" if len(args) <= 3 else "norm, silu" if args[2] else "norm")
        return one(*args, **out)

    monkeypatch.setattr(few_rows, "few_rows_linear", noted_few)
    monkeypatch.setattr(few_rows, "one_row_linear", noted_one)
    tile = few_rows.Tile(16, 32, 32, 2)  # so that the tiny model's inputs are several
    monkeypatch.setattr(few_rows, "few_rows_tile", lambda *_: tile)
    monkeypatch.setattr(few_rows, "NARROW", 256)  # the hidden size
    params = [  # the second one is there for the LM head to have several rows, once
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=20)
        for count in (3, 1)
    ]
    exact, _ = reference(folder, PROMPTS[:2], params, monkeypatch)
    assert not kinds
    llm = build(dtype="float16", enforce_eager=True)
    fast, _ = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert kinds == {"several", "several, silu", "split", "one", "norm", "norm, silu"}
    assert fast["token_ids"] == exact["token_ids"]
    for ours, theirs in zip(fast["logprobs"], exact["logprobs"], strict=True):
        shared = ours.keys() & theirs.keys()
        assert len(shared) >= 15
        assert all(abs(ours[i] - theirs[i]) < 0.05 for i in shared)


def test_without_triton_nothing_of_it_is_touched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the tensor says about its device."""

    class OnGpu:
        is_cuda = True

    assert kernels.usable(OnGpu()) == kernels.HAS_TRITON
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert not kernels.usable(OnGpu())
    assert not kernels.usable(torch.zeros(1))
    with LLM(folder, num_kvcache_blocks=8, kvcache_block_size=4) as llm:
        assert llm.model_runner.graphs is None and llm.model_runner.prefill_graphs is None
        assert (
            len(completions(llm, [[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))[0]) == 2
        )
