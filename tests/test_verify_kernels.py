"""`python -m nanovllm.verify`: its rows about kernels and CUDA graphs. CPU: the kernels run in
Triton's interpreter, and graphs are replayed without a GPU."""

import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from checkpoints import TINY_QWEN3
from replaying import add_graphs

from nanovllm import LLM
from nanovllm.engine import model_runner
from nanovllm.engine.decode_graphs import DecodeGraphs
from nanovllm.engine.prefill_graphs import PrefillGraphs
from nanovllm.layers.attention import torch_attention
from nanovllm.tools.equivalences import Equivalences
from nanovllm.tools.kernels import kernel_rows

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("with a GPU, verify itself is the test", allow_module_level=True)

KERNEL_ROWS = [
    "add + RMSNorm",
    "add + RMSNorm of summands",
    "norm + RoPE + KV store",
    "SiLU x up",
    "few rows",
    "few rows, in parts",
    "one row, norm + SiLU x up",
    "decode attention",
    "decode attention's KV store",
    "attention, prefill",
    "attention, history",
    "positions and slots",
    "sampler",
]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def cpu_llm() -> Iterator[LLM]:
    with LLM(TINY_QWEN3, device="cpu", num_kvcache_blocks=8) as llm:
        yield llm


# --- kernels --------------------------------------------------------------------------------------


def off_by_a_percent(kernel: Callable, *args: Any, **settings: Any) -> Any:
    out = kernel(*args, **settings)
    return tuple(x * 1.01 for x in out) if isinstance(out, tuple) else out * 1.01


def k_and_v_swapped(kernel: Callable, *args: Any) -> None:
    *before, k_cache, v_cache, positions, slots = args
    kernel(*before, v_cache, k_cache, positions, slots)


def next_slot(kernel: Callable, *args: Any) -> torch.Tensor:
    *before, context, scale = args
    return kernel(*before, replace(context, slot_mapping=context.slot_mapping + 1), scale)


def wrong_scale(kernel: Callable, *args: Any) -> torch.Tensor:
    return kernel(*args[:-1], args[-1] * 1.01)


def one_too_far(kernel: Callable, *args: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x + 1 for x in kernel(*args))


def without(field: str, kernel: Callable, logits: torch.Tensor, inputs: Any, *rest: Any) -> Any:
    return kernel(logits, replace(inputs, **{field: None}), *rest)


def no_advance(kernel: Callable, logits: torch.Tensor, inputs: Any, *_: Any) -> torch.Tensor:
    return kernel(logits, inputs)


def kernel_verdicts(llm: LLM) -> dict[str, str]:
    return {row.optimized: row.verdict for row in kernel_rows(llm)}


def test_kernels_of_an_engine_in_bfloat16(cpu_llm: LLM) -> None:
    """They are judged in float16: Triton's interpreter cannot multiply bfloat16 matrices."""
    with LLM(TINY_QWEN3, device="cpu", num_kvcache_blocks=8, dtype="bfloat16") as llm:
        verdicts = [row.verdict for row in kernel_rows(llm)]
    assert verdicts == [row.verdict for row in kernel_rows(cpu_llm)]
    assert verdicts.count("PASS") == len(KERNEL_ROWS) - 2


@pytest.mark.parametrize(
    ("kernel", "fault", "rows"),
    [
        ("fused_kernels.add_rms_norm", off_by_a_percent, KERNEL_ROWS[:2]),
        ("fused_kernels.norm_rope_store", k_and_v_swapped, ["norm + RoPE + KV store"]),
        ("fused_kernels.silu_and_mul_fused", off_by_a_percent, ["SiLU x up"]),
        ("few_rows.few_rows_linear", off_by_a_percent, KERNEL_ROWS[4:6]),
        ("few_rows.one_row_linear", off_by_a_percent, KERNEL_ROWS[4:7:2]),
        ("decode_attention.DecodeAttention.__call__", wrong_scale, ["decode attention"]),
        # Both: the padding row's slot -1 becomes 0, which another row reads.
        ("decode_attention.DecodeAttention.__call__", next_slot, KERNEL_ROWS[7:9]),
        ("decode_kernels.positions_and_slots", one_too_far, ["positions and slots"]),
        ("sampler_kernels.sample_triton", partial(without, "top_k"), ["sampler"]),
        ("sampler_kernels.sample_triton", partial(without, "top_p"), ["sampler"]),
        ("sampler_kernels.sample_triton", partial(without, "min_p"), ["sampler"]),
        ("sampler_kernels.sample_triton", no_advance, ["sampler"]),
    ],
)
def test_a_faulty_kernel_fails(
    kernel: str, fault: Callable, rows: list[str], cpu_llm: LLM, monkeypatch: Patch
) -> None:
    """The CPU engine does not use the kernels, so only their own rows can tell."""
    target = f"nanovllm.layers.{kernel}"
    right = pkgutil.resolve_name(target)

    def wrong(*args: Any, **settings: Any) -> Any:
        return fault(right, *args, **settings)

    monkeypatch.setattr(target, wrong)
    verdicts = kernel_verdicts(cpu_llm)
    assert list(verdicts) == KERNEL_ROWS
    assert [row for row, verdict in verdicts.items() if verdict == "FAIL"] == rows


def test_kernels_that_cannot_run_say_so(cpu_llm: LLM, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    rows = list(kernel_rows(cpu_llm))
    assert {row.verdict for row in rows} == {"not run"}
    assert rows[0].reason == "on the CPU it needs TRITON_INTERPRET=1 in the environment"


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "PASS"), (1.01, "FAIL")])
def test_fused_prefill_attention_is_compared_with_and_without_history(
    scale: float, verdict: str, monkeypatch: Patch
) -> None:
    """Stands in for flash-attn, which needs a GPU: another function, with a wrong scale or not."""

    def fused(*args: object) -> torch.Tensor:
        *tensors, factor = args
        return torch_attention(*tensors, factor * scale)

    monkeypatch.setattr(model_runner, "select_attention", lambda *_: fused)
    with LLM(TINY_QWEN3, device="cpu", num_kvcache_blocks=8) as llm:
        verdicts = kernel_verdicts(llm)
    assert verdicts["attention, prefill"] == verdicts["attention, history"] == verdict


# --- CUDA graphs ----------------------------------------------------------------------------------


def second_best(kernel: Callable, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    logits.scatter_(1, logits.argmax(1, keepdim=True), -torch.inf)
    return kernel(logits, *rest)


def graph_verdicts(monkeypatch: Patch) -> dict[str, str]:
    """Of the rows about graphs, in an engine whose graphs replay on the CPU."""
    with Equivalences(str(TINY_QWEN3), "cpu") as equivalences:
        assert equivalences.paths  # generated without graphs, which are slow here
        add_graphs(equivalences.base, monkeypatch)
        rows = [row for row in equivalences.graph_rows()]
    assert [row.optimized for row in rows] == ["CUDA graph, prefill", "CUDA graph, decode"]
    return {row.optimized.split()[-1]: row.verdict for row in rows}


def test_graph_steps_are_compared_with_eager_ones(monkeypatch: Patch) -> None:
    assert graph_verdicts(monkeypatch) == {"prefill": "PASS", "decode": "PASS"}


def test_a_graph_that_goes_on_with_its_own_ids_fails(monkeypatch: Patch) -> None:
    """The verifier accepts other ids than were sampled; a graph that does not notice computes
    another text."""

    def arrived(graphs: DecodeGraphs, token_ids: list[int]) -> None:
        graphs._rows = [(*row[:3], ANY) for row in graphs._rows]  # equal to whatever was accepted

    monkeypatch.setattr(DecodeGraphs, "arrived", arrived)
    assert graph_verdicts(monkeypatch) == {"prefill": "PASS", "decode": "FAIL"}


def test_a_prefill_graph_that_mixes_up_its_rows_fails(monkeypatch: Patch) -> None:
    launch = PrefillGraphs.launch
    monkeypatch.setattr(PrefillGraphs, "launch", lambda self, seqs: launch(self, seqs).flip(0))
    assert graph_verdicts(monkeypatch)["prefill"] == "FAIL"


def test_a_graph_that_samples_wrong_ids_fails(monkeypatch: Patch) -> None:
    """Its hidden states are right, and nobody else sees the logits inside it."""
    target = "nanovllm.layers.sampler_kernels.sample_triton"
    monkeypatch.setattr(target, partial(second_best, pkgutil.resolve_name(target)))
    assert graph_verdicts(monkeypatch) == {"prefill": "FAIL", "decode": "FAIL"}


def test_prefills_without_a_graph_miss_the_point(monkeypatch: Patch) -> None:
    monkeypatch.setattr(PrefillGraphs, "fits", lambda *_: False)
    assert graph_verdicts(monkeypatch) == {"prefill": "FAIL", "decode": "PASS"}
