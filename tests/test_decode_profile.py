"""bench.py --profile: exact numbers of made-up events, and real runs."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import TINY_QWEN3, make_checkpoint
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from nanovllm import LLM
from nanovllm.tools import decode_profile
from nanovllm.tools.decode_profile import (
    LEAD_STEPS,
    NAME_WIDTH,
    SETTLE_STEPS,
    STEPS,
    Row,
    Span,
    covered,
    cpu_numbers,
    gpu_numbers,
    gpu_spans,
    profile_decode,
    profile_lines,
    rows_by_name,
    short_name,
    whole_steps,
)

ROOT = Path(__file__).resolve().parent.parent
COPY = "Memcpy DtoH (Device -> Pinned)"


def step_spans(start: float) -> list[Span]:
    """A made-up step of 100 us: idle for 20, two kernels that overlap by 10, one inside the second,
    idle for 10, the copy of the ids."""
    kernels = [("attention", 20, 60), ("product", 50, 85), ("norm", 55, 65), (COPY, 95, 100)]
    return [Span(name, start + begin, start + end) for name, begin, end in kernels]


def recorded(num_steps: int) -> list[Span]:
    """So many of them, after the profiler's own start."""
    return [span for i in range(num_steps) for span in step_spans(1000.0 + 100 * i)]


# --- numbers of made-up events --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0),
        ([(3, 7)], 4),
        ([(0, 1), (5, 7)], 3),
        ([(0, 2), (2, 5)], 5),  # they touch
        ([(0, 4), (2, 6)], 6),
        ([(0, 10), (2, 3), (4, 5), (9, 12)], 12),  # one covers others, and is outlasted
        ([(6, 8), (0, 3), (7, 9), (1, 2)], 6),  # in any order
        ([(-5, -3), (-4, -1)], 4),
    ],
)
def test_covered(intervals: list[tuple[float, float]], expected: float) -> None:
    """Time in which two ran counts once; gaps do not count."""
    assert covered(Span("k", *interval) for interval in intervals) == expected


def test_whole_steps_begin_where_the_one_before_ends() -> None:
    """Of six steps the last two; what follows the last end, a step in flight, is left out."""
    spans = [*recorded(6), Span("attention", 1620, 1660)]
    chosen, window = whole_steps(spans[::-1], num_steps=2)
    assert window == 200
    assert sorted(chosen) == sorted(step_spans(1400.0) + step_spans(1500.0))


@pytest.mark.parametrize("num_recorded", [0, 1, 3, 3 + LEAD_STEPS + 2, 40])
def test_a_profile_that_cannot_be_cut_is_refused(num_recorded: int) -> None:
    """Too few ends of steps, or more than one a step: every number would be wrong."""
    with pytest.raises(RuntimeError, match=f"7 steps were recorded with {num_recorded} copies"):
        whole_steps(recorded(num_recorded), num_steps=3)


@pytest.mark.parametrize("num_recorded", [4, 3 + LEAD_STEPS, 3 + LEAD_STEPS + 1])
def test_any_number_of_steps_in_front_gives_the_same_numbers(num_recorded: int) -> None:
    numbers = gpu_numbers(recorded(num_recorded), num_steps=3, step_ms=0.08)
    assert numbers == gpu_numbers(recorded(5), num_steps=3, step_ms=0.08)


def test_gpu_numbers() -> None:
    """Of 100 us 20..85 and 95..100 are busy: 70; the durations sum to 40 + 35 + 10 + 5."""
    numbers = gpu_numbers(recorded(STEPS + LEAD_STEPS), STEPS, step_ms=0.08)
    assert {name: numbers[name] for name in numbers if name != "kernels"} == pytest.approx(
        {
            "profiled_step_ms": 0.1,
            "kernel_ms": 0.09,
            "busy_ms": 0.07,
            "idle_share": 0.3,
            "idle_share_estimate": 1 - 70 / 80,
        }
    )
    assert [row["name"] for row in numbers["kernels"]] == ["attention", "product", "norm", COPY]
    assert [row["us"] for row in numbers["kernels"]] == [40, 35, 10, 5]
    assert {row["calls"] for row in numbers["kernels"]} == {1}


def test_rows_by_name() -> None:
    """Calls and us of one step, each row's share of all, the longest first."""
    times = [("a", 1.0), ("b", 6.0), ("a", 2.0), ("c", 0.5), ("b", 6.0), ("c", 0.5)]
    assert rows_by_name(times, num_steps=2) == [
        Row("b", calls=1, us=6, share=12 / 16),
        Row("a", calls=1, us=1.5, share=3 / 16),
        Row("c", calls=1, us=0.5, share=1 / 16),
    ]


def test_short_names() -> None:
    name = "void at::native::(anonymous namespace)::gather<4, at::native::Add<float> >(int)"
    assert short_name(name) == "gather<4, Add<float> >(int)"
    assert short_name(COPY) == COPY
    long = "k" * (NAME_WIDTH + 1)
    assert short_name(long) == "k" * (NAME_WIDTH - 3) + "..."
    rows = rows_by_name([(long + "a", 1.0), (long + "b", 1.0)], num_steps=1)
    assert len(rows) == 2  # kernels of their own, though they look the same


def event(span: Span, device_type: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
    """What is used of torch.profiler's FunctionEvent."""
    interval = SimpleNamespace(start=span.start, end=span.end)
    return SimpleNamespace(name=span.name, device_type=device_type, time_range=interval)


def test_launches_and_waits_are_not_spans_of_the_gpu() -> None:
    """With CUDA activities come the runtime's calls, which ran on the host, and waits."""
    span = Span("attention", 3.0, 5.5)
    launch = event(Span("cudaGraphLaunch", 1.0, 9.0), DeviceType.CPU)
    wait = event(Span("Event Sync", 2.0, 9.0))
    assert gpu_spans([launch, event(span), wait]) == [span]


def test_without_a_gpu_nothing_is_said_of_idling() -> None:
    events = [SimpleNamespace(name="mm", self_cpu_time_total=30.0) for _ in range(4)]
    numbers = cpu_numbers(events, num_steps=2, step_ms=0.1)
    assert numbers["kernels"] == [{"name": "mm", "calls": 2, "us": 60, "share": 1}]
    assert (numbers["profiled_step_ms"], numbers["kernel_ms"]) == (0.1, 0.06)
    assert [numbers[name] for name in numbers if "busy" in name or "idle" in name] == [None] * 3


# --- runs -----------------------------------------------------------------------------------------


class FakeGPU:
    """An engine of one request that says it is on a GPU, and the profiler: while that is on, each
    turn of the loop records a step."""

    def __init__(self) -> None:
        self.left, self.is_on = 0, False
        self.log: list[str] = []
        self.recorded: list[SimpleNamespace] = []
        self.model_runner = SimpleNamespace(device=torch.device("cuda"))
        self.scheduler = SimpleNamespace(waiting=())

    def add_request(self, prompt: list[int], params: Any) -> None:
        self.left = params.max_tokens

    def is_finished(self) -> bool:
        return self.left <= 0

    def _loop_step(self) -> tuple[list[Any], int]:
        self.left -= 1
        self.log.append("recorded" if self.is_on else "plain")
        if self.is_on:
            begin = 100.0 * len(self.log)
            self.recorded += [event(span) for span in step_spans(begin)]
        return [], -1

    step = _loop_step

    def profiler(self, activities: list[ProfilerActivity]) -> "FakeGPU":
        assert activities == [ProfilerActivity.CUDA]
        return self

    def __enter__(self) -> None:
        self.is_on, self.recorded = True, []

    def __exit__(self, *exc_info: object) -> None:
        self.is_on = False

    def events(self) -> list[SimpleNamespace]:
        return self.recorded


def test_a_gpu_is_timed_before_the_profiler_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches: both are timed, then both recorded, each from a steady state of the same age."""
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")  # which profile_decode sets, undone after the test
    gpu = FakeGPU()
    monkeypatch.setattr(decode_profile, "profile", gpu.profiler)
    results = profile_decode(gpu, [[[1, 2, 3]], [[4]]], temperature=0.6)
    plain_run = 1 + SETTLE_STEPS + STEPS + 1
    assert gpu.log[: 2 * plain_run] == ["plain"] * (2 * plain_run)
    profiled_run = ["plain"] * SETTLE_STEPS + ["recorded"] * (LEAD_STEPS + STEPS) + ["plain"] * 2
    assert gpu.log[2 * plain_run :] == profiled_run * 2
    for result, prompt_tokens in zip(results, (3, 1), strict=True):
        assert (result["batch"], result["steps"]) == (1, STEPS)
        assert result["context"] == prompt_tokens + SETTLE_STEPS + STEPS // 2
        assert result["idle_share"] == pytest.approx(0.3)
        busy_ms, step_ms = result["busy_ms"], result["step_ms"]
        assert result["idle_share_estimate"] == pytest.approx(1 - busy_ms / step_ms)
    text = "\n".join(profile_lines(results[0]))
    assert "GPU busy                            0.070 ms a step" in text
    assert "GPU idle in the profile             30.0%" in text


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_profile, "SETTLE_STEPS", 3)
    monkeypatch.setattr(decode_profile, "STEPS", 5)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_only_whole_decode_steps_are_recorded(runs_ahead: bool, few_steps: None) -> None:
    """In both loops: four products a layer and the LM head's, no prefill among them, and the engine
    is idle again."""
    with LLM(TINY_QWEN3, device="cpu", num_kvcache_blocks=8) as llm:
        llm.runs_ahead = runs_ahead
        results = profile_decode(llm, [[[5] * 9, [6, 7]], [[8] * 4]], temperature=0.6)
        assert llm.is_finished() and not llm.requests and llm.stats()["kv_blocks_used"] == 0
        num_layers = len(llm.model_runner.model.model.layers)
    assert [result["batch"] for result in results] == [2, 1]
    for result in results:
        calls = {row["name"]: row["calls"] for row in result["kernels"]}
        assert calls["aten::mm"] == 4 * num_layers + 1
        assert sum(row["share"] for row in result["kernels"]) == pytest.approx(1)
        assert 0 < result["kernel_ms"] < result["profiled_step_ms"] and result["step_ms"] > 0


@pytest.mark.parametrize("limit", [{"max_num_seqs": 1}, {"max_model_len": 32}])
def test_a_batch_that_does_not_decode_together_is_refused(limit: dict[str, int]) -> None:
    """Its steps would be those of a smaller batch than the one reported."""
    with LLM(TINY_QWEN3, device="cpu", num_kvcache_blocks=8, **limit) as llm:
        with pytest.raises(ValueError, match=r"2 requests of up to 9 .* not decode together"):
            profile_decode(llm, [[[5] * 9, [6, 7]]], temperature=0.6)
        assert llm.is_finished() and not llm.requests


def test_bench_profile_on_cpu(
    few_steps: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table each for the batch and for one request; the last line has the same, as JSON."""
    monkeypatch.syspath_prepend(ROOT)
    bench = importlib.import_module("bench")
    flags = ["--num-seqs", "3", "--min-input", "8", "--max-input", "16", "--device", "cpu"]
    bench.print_report(bench.bench(bench.parse_args(["--profile", *flags])))
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert [result["batch"] for result in report["profile"]] == [3, 1]
    assert report["workload"]["num_seqs"] == 3 and report["device"] == "cpu"
    assert "output_tok_s" not in report and report["init_seconds"] > 0
    for result in report["profile"]:
        assert "\n".join(profile_lines(result)) in printed
        assert {"name", "calls", "us", "share"} == result["kernels"][0].keys()
        assert result["idle_share"] is None and "idle" not in "".join(profile_lines(result))


def test_one_request_is_profiled_once(few_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    bench = importlib.import_module("bench")
    flags = ["--profile", "--num-seqs", "1", "--device", "cpu"]
    report = bench.bench(bench.parse_args(flags))
    assert [result["batch"] for result in report["profile"]] == [1]


@pytest.mark.gpu
def test_the_profile_of_a_gpu(tmp_path: Path) -> None:
    """With graphs captured before the profiler first runs, and twice."""
    folder = make_checkpoint(tmp_path, vocab_size=2048, head_dim=64)
    with LLM(folder, dtype="bfloat16", num_kvcache_blocks=64, max_num_seqs=16) as llm:
        results = profile_decode(llm, [[[i] * 9 for i in range(1, 9)], [[1] * 9]], temperature=0.6)
        assert llm.is_finished() and llm.model_runner.num_graph_misses == 0
    for result in results:
        names = {row["name"]: row["calls"] for row in result["kernels"]}
        assert [calls for name, calls in names.items() if "DtoH" in name] == [1]
        assert len(names) > 4
        assert 0 < result["busy_ms"] <= min(result["kernel_ms"], result["profiled_step_ms"]) + 1e-6
        assert 0 <= result["idle_share"] < 1 and result["idle_share_estimate"] < 1
