"""ModelRunner on CPU: start-up order, device, dtype and pool size; what a step writes, and a step
launched before the one before it was collected."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TQ, make_checkpoint, random_ids

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine import kv_cache, model_runner
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import PENDING, Sequence
from nanovllm.layers.attention import Attention
from nanovllm.utils.hf import load_model_config

CPU = torch.device("cpu")
# K and V, layers, KV heads, head_dim, float32
POSITION_BYTES = 2 * TQ["num_hidden_layers"] * TQ["num_key_value_heads"] * TQ["head_dim"] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


def start(folder: Path, **settings: Any) -> ModelRunner:
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 8, "max_model_len": 32, **settings}
    config = Config(model=str(folder), device="cpu", **settings)
    return ModelRunner(config, load_model_config(str(folder)), frozenset())


def sequence(length: int, table: list[int], num_cached: int = 0) -> Sequence:
    seq = Sequence(random_ids(length, seed=length), SamplingParams(temperature=0), block_size=4)
    seq.block_table, seq.num_cached_tokens = table, num_cached
    seq.num_scheduled_tokens = length - num_cached
    return seq


# --- start-up -------------------------------------------------------------------------------------


def test_parts_are_made_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is sized after the weights are there: what they leave is what it may take."""
    order: list[str] = []
    for name in ("resolve_device", "Qwen3ForCausalLM", "load_weights"):
        monkeypatch.setattr(model_runner, name, _noting(order, name, getattr(model_runner, name)))
    for name in ("measure_num_blocks", "check_pool", "allocate_kv_cache"):
        monkeypatch.setattr(model_runner, name, _noting(order, name, getattr(model_runner, name)))
    monkeypatch.setattr(kv_cache, "CPU_POOL_BYTES", 1 << 20)
    start(folder, num_kvcache_blocks=None)
    assert order == [
        "resolve_device",
        "Qwen3ForCausalLM",
        "load_weights",
        "measure_num_blocks",
        "check_pool",
        "allocate_kv_cache",
    ]


@pytest.mark.parametrize(
    ("budget", "max_model_len", "max_num_seqs", "lengths"),
    [
        (64, 32, 4, [32, 32]),
        (64, 24, 4, [24, 24, 16]),  # nothing of the budget is left over
        (16, 32, 4, [16]),
        (64, 8, 4, [8] * 4),
    ],
)
def test_the_warm_up_is_the_largest_prefill(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    max_model_len: int,
    max_num_seqs: int,
    lengths: list[int],
) -> None:
    """What it needs at its peak stays free when the pool takes the rest. Then the most logits."""
    limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    runner = start(folder, max_num_batched_tokens=budget, **limits)
    steps: list[list[int]] = []
    params = SamplingParams(logprobs=20)
    launch = runner.launch

    def noting(seqs: list[Sequence], is_prefill: bool) -> Any:
        assert is_prefill
        steps.append([seq.num_scheduled_tokens for seq in seqs])
        assert {seq.sampling_params for seq in seqs} == {params}
        return launch(seqs, is_prefill)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(runner, "launch", noting)
    runner._warm_up(params)
    assert steps == [lengths, [1] * max_num_seqs]


def test_a_model_that_memory_does_not_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setattr(model_runner, "Qwen3ForCausalLM", fail)
    with pytest.raises(ValueError, match=f"{folder}: no memory for the model .* 1 TiB"):
        start(folder)


def test_a_step_that_memory_does_not_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names what to lower."""

    def fail(self: ModelRunner) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setattr(ModelRunner, "_num_blocks", fail)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=16384 .* lower one .* 1 TiB"):
        start(folder)


def _noting(order: list[str], name: str, function: Any) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        order.append(name)
        return function(*args, **kwargs)

    return noted


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)],
)
def test_dtype_on_cpu(folder: Path, setting: str, dtype: torch.dtype) -> None:
    """A bfloat16 checkpoint runs in float32 on the CPU unless told otherwise; the whole runner is
    in one dtype, and torch's default is left as it was."""
    runner = start(folder, dtype=setting)
    assert {param.dtype for param in runner.model.parameters()} == {dtype}
    assert runner.kv_cache.dtype == dtype
    assert torch.get_default_dtype() == torch.float32
    (token_id,) = runner.call("run", [sequence(5, [0, 1])], True)
    assert 0 <= token_id < TQ["vocab_size"]


def test_a_failed_start_leaves_torchs_default_dtype(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr(model_runner, "Qwen3ForCausalLM", fail)
    with pytest.raises(ValueError, match="no such model"):
        start(folder, dtype="bfloat16")
    assert torch.get_default_dtype() == torch.float32


def test_device_auto_is_cpu_without_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert LLM(folder, num_kvcache_blocks=2).model_runner.device == CPU


def test_the_pool_of_a_cpu_is_one_gib() -> None:
    assert kv_cache.CPU_POOL_BYTES == 2**30
    block_bytes = 256 * POSITION_BYTES
    assert kv_cache.measure_num_blocks(CPU, 0.9, block_bytes) == 8192


def test_the_pool_is_sized_in_whole_blocks_of_its_dtype(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 19.9 blocks of float32 is room for 39 of bfloat16."""
    monkeypatch.setattr(kv_cache, "CPU_POOL_BYTES", int(19.9 * 4 * POSITION_BYTES))
    for dtype, num_blocks in (("float32", 19), ("bfloat16", 39)):
        runner = start(folder, num_kvcache_blocks=None, dtype=dtype)
        assert runner.num_kvcache_blocks == num_blocks
        assert runner.kv_cache.shape == (2, 2, num_blocks, 4, 2, 16)
        assert runner.kv_cache.nbytes <= kv_cache.CPU_POOL_BYTES


def test_a_given_number_of_blocks_is_obeyed(folder: Path) -> None:
    """Exactly, even if it cannot hold max_model_len: requests are checked one by one."""
    runner = start(folder, num_kvcache_blocks=3, max_model_len=32)
    assert runner.num_kvcache_blocks == 3
    assert runner.kv_cache.shape == (2, 2, 3, 4, 2, 16)


def test_one_line_at_info_says_what_was_chosen(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention, dtype, device, graphs, the pool in blocks and tokens, and the number of ranks."""
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        runner = start(folder, dtype="bfloat16")
        runner.call("run", [sequence(5, [0, 1])], True)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        "torch_attention, torch.bfloat16 on cpu, CUDA graphs off, 8 KV blocks (32 tokens), "
        "world size 1"
    )


# --- running --------------------------------------------------------------------------------------


def test_run_writes_just_the_scheduled_slots_and_changes_no_sequence(folder: Path) -> None:
    """Positions 2..5 of a sequence with table [5, 2], and the 3 of one with table [0]."""
    runner = start(folder)
    seqs = [sequence(6, [5, 2], num_cached=2), sequence(3, [0])]
    before = [(repr(seq), list(seq.token_ids)) for seq in seqs]
    token_ids = runner.call("run", seqs, True)
    assert len(token_ids) == 2
    assert [(repr(seq), list(seq.token_ids)) for seq in seqs] == before
    written = runner.kv_cache.flatten(2, 3).abs().amax(dim=(-1, -2)) > 0  # [2, layers, slots]
    slots = [0, 1, 2, 8, 9, 22, 23]
    assert all(row.nonzero().flatten().tolist() == slots for row in written.flatten(0, 1))


def test_every_layer_writes_its_own_part_of_the_pool(folder: Path) -> None:
    runner = start(folder)
    runner.call("run", [sequence(4, [3])], True)
    layers = [module for module in runner.model.modules() if isinstance(module, Attention)]
    parts = [part for layer in layers for part in (layer.k_cache[3], layer.v_cache[3])]
    for i, part in enumerate(parts):
        assert all(not torch.equal(part, other) for other in parts[i + 1 :])


def test_a_pending_token_comes_from_the_step_before(folder: Path) -> None:
    """Launched before the host knows the ids, in other rows, beside a row whose id is known: the
    step computes what it computes with the ids."""
    tokens: dict[bool, list[int]] = {}
    for ahead in (False, True):
        runner = start(folder)
        a, b, c = sequence(5, [0, 1]), sequence(7, [2, 3]), sequence(6, [4, 5])
        runner.call("run", [c], True)
        c.append_token(8)
        first = runner.call("launch", [a, b], True)
        for seq, token_id in zip((a, b), runner.call("collect", first), strict=True):
            seq.append_token(PENDING if ahead else token_id)
        for seq in (a, b, c):
            seq.num_cached_tokens, seq.num_scheduled_tokens = len(seq) - 1, 1
        tokens[ahead] = runner.call("run", [c, b, a], False)
        assert len(set(tokens[ahead])) == 3, "a mixed-up row would not show"
    assert tokens[True] == tokens[False]


def test_a_later_launch_leaves_an_earlier_steps_ids_alone(folder: Path) -> None:
    """They are collected after it."""
    runner = start(folder)
    seq, other = sequence(5, [0, 1]), sequence(7, [2, 3])
    expected = runner.call("run", [seq], True)
    first = runner.call("launch", [seq], True)
    second = runner.call("launch", [other], True)
    assert runner.call("collect", second) != expected
    assert runner.call("collect", first) == expected
