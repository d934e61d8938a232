"""`python -m nanovllm.verify`: a sound engine passes, and a planted fault fails in the rows that
are about it, and only there. CPU, the bundled model. The rows of kernels and CUDA graphs are tested
in test_verify_kernels.py."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nanovllm.engine import llm_engine
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.inputs import StepInputs
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.tools.comparison import EXACT, NotRun, Tolerance, compare, measured
from nanovllm.tools.equivalences import Equivalences
from nanovllm.verify import BUNDLED_MODEL, parse_args, run

LOGIT_ROWS = [
    "this engine",
    "KV cache",
    "chunked prefill",
    "prefix hit",
    "preempted and resumed",
    "CUDA graph, prefill",
    "CUDA graph, decode",
    "TP=2",
    "TP=4",
]
LAST_ROW = "batched with others"  # after those of the kernels
# Where the tolerance of a row with this reference comes from, and how large it may be.
SOURCES = {
    "torch, float32": ("plain torch's float16 error", 2e-3),
    "plain torch": ("exact", 0),
}
Patch = pytest.MonkeyPatch


def verify(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict]]:
    """(exit code, optimized -> row) of a run with --json."""
    capsys.readouterr()
    code = run(parse_args(["--device", "cpu", "--json"]))
    rows = json.loads(capsys.readouterr().out)["rows"]
    names = [row["optimized"] for row in rows]
    assert names[: len(LOGIT_ROWS)] == LOGIT_ROWS and names[-1] == LAST_ROW
    return code, {row["optimized"]: row for row in rows}


def failed(rows: dict[str, dict]) -> set[str]:
    return {name for name, row in rows.items() if row["verdict"] == "FAIL"}


def test_a_sound_engine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row that one CPU can show; the tolerance is transformers' own float32 error, so it is
    tight; each row that is not run says why."""
    code, rows = verify(capsys)
    assert code == 0 and not failed(rows)
    for name, row in rows.items():
        if name.startswith(("CUDA graph", "TP=", "attention")):
            assert row["verdict"] == "not run"
        if row["verdict"] == "not run":
            assert row["reason"] and row["errors"] is None
            continue
        errors, tolerance = row["errors"], row["tolerance"]
        source, limit = SOURCES.get(row["reference"], ("transformers' own float32 error", 1e-5))
        assert source in tolerance["source"]
        assert errors["top1_agreement"] == 1
        assert errors["relative_l2"] <= tolerance["relative_l2"] <= limit
        assert errors["max_abs"] <= tolerance["max_abs"]
    assert rows["this engine"]["errors"]["max_abs"] > 0, "two implementations never agree exactly"


def test_the_command_and_its_report() -> None:
    """In a process of its own, as users run it: a line a row, the sources of the tolerances, why
    rows were not run, the counts."""
    command = [sys.executable, "-m", "nanovllm.verify", "--device", "cpu"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("model ") and "dtype float32" in lines[0]
    (first,) = (line for line in lines if line.startswith("this engine"))
    assert "transformers" in first and "100.0%" in first and first.endswith("[1]   PASS")
    assert sum(line.endswith("  PASS") for line in lines) >= 6
    assert "[1] 3 x transformers' own float32 error, against its float64 run" in lines
    why = "CUDA graphs need a GPU and triton, the device is cpu"
    assert f"CUDA graph, decode: not run: {why}" in lines
    assert " PASS, 0 FAIL, " in lines[-1]


def test_a_wrong_rope_base_fails(capsys: pytest.CaptureFixture[str], monkeypatch: Patch) -> None:
    """The engine agrees with itself, and only transformers knows better."""
    load = llm_engine.load_model_config
    wrong = lambda folder: replace(load(folder), rope_theta=10_000.0)  # noqa: E731
    monkeypatch.setattr(llm_engine, "load_model_config", wrong)
    code, rows = verify(capsys)
    assert code == 1 and failed(rows) == {"this engine"}


def test_an_off_by_one_position_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    """In decode only: a shift of all positions would not change what RoPE sees."""
    run_model = ModelRunner.run_model

    def shifted(self: ModelRunner, inputs: StepInputs) -> torch.Tensor | None:
        if not inputs.context.is_prefill:
            inputs = replace(inputs, positions=inputs.positions + 1)
        return run_model(self, inputs)

    monkeypatch.setattr(ModelRunner, "run_model", shifted)
    code, rows = verify(capsys)
    assert code == 1 and failed(rows) == {"this engine", "KV cache", "preempted and resumed"}


def test_a_stale_block_fails(capsys: pytest.CaptureFixture[str], monkeypatch: Patch) -> None:
    """A block that is reused keeps its place in the prefix index: whoever comes back for the
    prefix gets what another request has written since."""
    take = BlockManager._take_free_block

    def forgetful(self: BlockManager) -> int:
        index, block = dict(self.hash_to_block_id), self.blocks[next(iter(self.free_block_ids))]
        kept = block.hash, block.token_ids
        block_id = take(self)
        self.hash_to_block_id.update(index)
        block.hash, block.token_ids = kept
        return block_id

    monkeypatch.setattr(BlockManager, "_take_free_block", forgetful)
    code, rows = verify(capsys)
    assert code == 1 and failed(rows) == {"preempted and resumed"}


def test_history_read_from_the_wrong_block_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    """Only prefills with history read a table: chunks and prefix hits, also after a preemption."""
    run_model = ModelRunner.run_model

    def stale(self: ModelRunner, inputs: StepInputs) -> torch.Tensor | None:
        context = inputs.context
        if context.is_prefill and context.block_tables is not None:
            tables = context.block_tables.clone()
            tables[:, 0] = tables[:, -1]
            inputs = replace(inputs, context=replace(context, block_tables=tables))
        return run_model(self, inputs)

    monkeypatch.setattr(ModelRunner, "run_model", stale)
    code, rows = verify(capsys)
    assert code == 1 and {"chunked prefill", "prefix hit"} <= failed(rows)
    assert not failed(rows) & {"this engine", "KV cache", "batched with others"}


def test_a_size_that_was_asked_for_and_cannot_be_fails() -> None:
    """Two and four ranks are tried wherever there are GPUs; --tp 3 is somebody's question."""
    with Equivalences(str(BUNDLED_MODEL), "cpu", tp_sizes=[3]) as equivalences:
        with pytest.raises(ValueError, match=r"num_attention_heads \(4\) cannot be divided"):
            equivalences._tensor_parallel(3)
        equivalences.tp_sizes = []
        with pytest.raises(NotRun):
            equivalences._tensor_parallel(3)
    with pytest.raises(SystemExit):
        parse_args(["--tp", "1"])


def test_a_comparison_that_misses_its_point_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    """Without a prefix cache the results are right, but no hit was compared with anything."""
    monkeypatch.setattr(BlockManager, "_find_hits", lambda self, seq: [])
    code, rows = verify(capsys)
    assert code == 1 and failed(rows) == {"prefix hit"}
    assert "0 positions were hit, not 32" in rows["prefix hit"]["reason"]


def test_a_missing_model_is_reported_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(sys, "argv", ["verify", "--model", "no/such/folder"])
    monkeypatch.delitem(sys.modules, "nanovllm.verify")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("nanovllm.verify", run_name="__main__")
    assert stop.value.code == 2
    assert "verify: model folder 'no/such/folder' does not exist" in capsys.readouterr().err


# --- judging --------------------------------------------------------------------------------------


def judge(run: Callable[[], tuple]) -> str:
    return compare("fast", "plain", run).verdict


def test_verdicts() -> None:
    """Both errors must be within; NaN never is; an exception is a failure, NotRun is not."""
    ones = [torch.ones(2, 3)]
    near = [torch.tensor([[1.0, 1.0, 1.5], [1.0, 1.0, 1.0]])]
    assert judge(lambda: (ones, ones, EXACT)) == "PASS"
    assert judge(lambda: (near, ones, Tolerance(0.5, 1.0, ""))) == "PASS"
    assert judge(lambda: (near, ones, Tolerance(0.49, 1.0, ""))) == "FAIL"
    assert judge(lambda: (near, ones, Tolerance(0.5, 0.2, ""))) == "FAIL"  # 0.5 / sqrt(6) = 0.204
    assert judge(lambda: ([ones[0] * torch.nan], ones, Tolerance(9, 9, ""))) == "FAIL"
    assert judge(lambda: (near, [torch.ones(4, 3)], Tolerance(9, 9, ""))) == "FAIL"

    def impossible() -> tuple:
        raise NotRun("no GPU")

    row = compare("fast", "plain", impossible)
    assert (row.verdict, row.reason) == ("not run", "no GPU")


def test_a_tolerance_is_three_times_the_measured_error() -> None:
    exact = [torch.tensor([[3.0, 4.0]])]
    own = [torch.tensor([[3.0, 4.5]])]
    tolerance = measured(own, exact, "its own error")
    assert tolerance == Tolerance(1.5, pytest.approx(0.3), "3 x its own error")
