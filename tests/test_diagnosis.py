"""What the engine tells of itself: stats, the progress bar, the log."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TINY_QWEN3, make_checkpoint, random_ids
from recording import GREEDY

from nanovllm import LLM, SamplingParams
from nanovllm.engine.progress_bar import ProgressBar

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with start(folder) as engine:
        yield engine


def start(folder: Path, **settings: Any) -> LLM:
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 16, **settings}
    return LLM(folder, device="cpu", **settings)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **GREEDY)


# --- stats ----------------------------------------------------------------------------------------


def test_stats_count_every_step_of_a_job(folder: Path) -> None:
    """Two prompts of 9 equal ids, one after the other, in chunks of 5: positions computed, hits,
    and the state between the steps."""
    with start(folder, max_num_batched_tokens=5) as llm:
        idle = {
            "steps": 0,
            "prefill_tokens": 0,
            "decode_tokens": 0,
            "prefix_hit_tokens": 0,
            "preemptions": 0,
            "graph_replays": 0,
            "graph_misses": 0,
            "waiting": 0,
            "running": 0,
            "kv_blocks": 16,
            "kv_blocks_used": 0,
            "kv_usage": 0.0,
        }
        assert llm.stats() == idle
        llm.add_request(random_ids(9), params(3))
        assert llm.stats() == idle | {"waiting": 1}
        used = {"kv_blocks_used": 3, "kv_usage": 3 / 16}
        llm.step()
        assert llm.stats() == idle | used | {"steps": 1, "prefill_tokens": 5, "waiting": 1}
        llm.step()
        done = {"steps": 2, "prefill_tokens": 9}
        assert llm.stats() == idle | used | done | {"running": 1}
        llm.step()
        done |= {"steps": 3, "decode_tokens": 1, "graph_misses": 1}
        assert llm.stats() == idle | used | done | {"running": 1}
        llm.step()
        done |= {"steps": 4, "decode_tokens": 2, "graph_misses": 2}
        assert llm.stats() == idle | done
        llm.generate([random_ids(9)], params(1), use_tqdm=False)
        assert llm.stats() == idle | done | {
            "steps": 5,
            "prefill_tokens": 10,
            "prefix_hit_tokens": 8,
        }


def test_stats_count_preemptions_and_what_they_cost(folder: Path) -> None:
    """Computed and hit positions together are those needed and those computed again."""
    with start(folder, num_kvcache_blocks=8) as llm:
        prompts = [random_ids(count, seed=count) for count in (7, 9, 6)]
        llm.generate(prompts, params(12), use_tqdm=False)
        stats = llm.stats()
        assert stats["preemptions"] > 0
        needed = sum(len(prompt) + 12 - 1 for prompt in prompts)
        assert stats["decode_tokens"] <= 3 * 11
        assert stats["prefill_tokens"] + stats["decode_tokens"] > needed
        assert stats["kv_usage"] == 0.0 and stats["running"] == stats["waiting"] == 0


def test_a_failed_step_is_not_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.stats()

    def fail(*_: Any) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(llm.model_runner, "run", fail)
    with pytest.raises(RuntimeError, match="made to fail"):
        llm.generate([[1, 2]], params(3), use_tqdm=False)
    assert llm.stats() == before


def test_every_statistic_is_documented(llm: LLM) -> None:
    for name in llm.stats():
        assert re.search(rf"\b{name}\b", LLM.stats.__doc__), name


# --- the progress bar -----------------------------------------------------------------------------


def shown_by(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[str]:
    """The bar's line after each step, by way of a terminal that is a string."""
    import nanovllm.engine.progress_bar as module

    lines: list[str] = []

    class Bar(module.tqdm):
        def update(self, n: float = 1) -> bool | None:
            shown = super().update(n)
            lines.append(str(self))
            return shown

    original, module.tqdm = module.tqdm, lambda **kw: Bar(file=io.StringIO(), **kw)
    try:
        llm.generate(prompts, params(max_tokens))
    finally:
        module.tqdm = original
    return lines


def test_bar_shows_finished_requests_speeds_and_kv_use(llm: LLM) -> None:
    lines = shown_by(llm, [random_ids(4), random_ids(8, seed=1)], 3)
    assert len(lines) == 3
    pattern = r"Prefill=\d+tok/s, Decode=\d+tok/s, KV={}%\]$"
    for line, done, used in zip(lines, (0, 0, 2), (19, 31, 0), strict=True):
        assert f"| {done}/2 [" in line
        assert re.search(pattern.format(used), line), line


def test_the_bars_speed_is_positions_per_second(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the latest step of each kind, since the one before it, by a clock set by hand."""
    clock = iter([10.0, 10.5, 10.75])
    monkeypatch.setattr("nanovllm.engine.progress_bar.perf_counter", lambda: next(clock))
    bar = ProgressBar(2, llm.scheduler, enabled=True)
    bar.update(0, 100)
    bar.update(2, -8)
    bar.close()
    assert bar.speed == {True: 200.0, False: 32.0}


def test_bar_shows_preemptions_of_this_call_when_there_are_any(folder: Path) -> None:
    with start(folder, num_kvcache_blocks=8) as llm:
        prompts = [random_ids(count, seed=count) for count in (7, 9, 6)]
        lines = shown_by(llm, prompts, 12)
        count = llm.stats()["preemptions"]
        assert "preemptions" not in lines[0] and f"preemptions={count}]" in lines[-1]
        assert "preemptions" not in shown_by(llm, [[1]], 2)[-1], "those are history"


def test_the_bar_goes_on_while_nothing_ends(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """After several have ended at once; and a call that took no step in says nothing of speed."""
    bar = ProgressBar(20, llm.scheduler, enabled=True)
    bar.bar.mininterval = 0
    bar.update(8, -8)
    capsys.readouterr()
    bar.update(0, -4)
    assert "8/20" in capsys.readouterr().err
    speed = dict(bar.speed)
    bar.update(0, 0)
    assert bar.speed == speed and speed[False] > 0
    bar.close()


# --- the log --------------------------------------------------------------------------------------

JOB = """
import logging, sys
if sys.argv[2] == "INFO":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("transformers").setLevel(logging.WARNING)
from nanovllm import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", num_kvcache_blocks=6) as llm:
    params = SamplingParams(max_tokens=5, seed=1, top_k=9, stop="zzz", logprobs=1)
    llm.generate(["ROMEO:"], params, use_tqdm=False)
    list(llm.stream(["ROMEO:"], params))
    llm.chat([{"role": "user", "content": "JULIET:"}], params, use_tqdm=False)
"""


@pytest.mark.parametrize("level", ["default", "INFO"])
def test_silent_by_default_and_one_line_at_info(level: str) -> None:
    """From the start to the end of an engine that does a bit of everything."""
    command = [sys.executable, "-c", JOB, str(TINY_QWEN3), level]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "nanovllm" in line]
    expected = (
        "INFO nanovllm.engine.model_runner: torch_attention, torch.float32 on cpu, CUDA "
        "graphs off, 6 KV blocks (1536 tokens), world size 1"
    )
    assert lines == ([expected] if level == "INFO" else [])
    assert done.stdout == ""
    if level == "default":
        assert done.stderr == ""
