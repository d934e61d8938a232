"""Tensor parallel: a start that fails, a caller that is killed, Ctrl-C. Nothing is left, and the
ranks never outlive their caller."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from processes import (
    caller,
    generate,
    is_running,
    let_rank_1_be_killed_at_the_meeting_point,
    let_rank_1_look_elsewhere,
    message_of_end,
    remains,
    start,
    wait_until_gone,
)

from nanovllm import LLM
from nanovllm.engine.lead_runner import LeadRunner
from nanovllm.engine.workers import Workers
from nanovllm.utils.process_group import ProcessGroup


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """Two ranks, which go on beside what the tests do."""
    with start(folder) as engine:
        yield engine


# --- start ----------------------------------------------------------------------------------------


def test_killed_as_soon_as_it_is_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While Python itself starts in it, and rank 0 waits for it at the meeting point."""
    before = remains()
    let_rank_1_be_killed_at_the_meeting_point(monkeypatch)
    assert "rank 1" in (message := message_of_end(lambda: start(folder)))
    assert "was killed by SIGKILL" in message
    assert remains() == before


def test_killed_while_the_ranks_connect(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs rank 0 then waits for it in the midst of that: what the watch aborts."""
    before = remains()
    join_group, aborted = Workers.join_group, threading.Event()

    def join(self: Workers, *args: Any) -> Any:
        def connect(*_: Any) -> None:
            os.kill(self._processes[0].pid, signal.SIGKILL)
            assert aborted.wait(30), "nobody let rank 0 go"

        monkeypatch.setattr(ProcessGroup, "connect", connect)
        return join_group(self, *args)

    monkeypatch.setattr(Workers, "join_group", join)
    monkeypatch.setattr(ProcessGroup, "abort", lambda _: aborted.set())
    message = message_of_end(lambda: start(folder))
    assert "rank 1" in message and "was killed by SIGKILL" in message
    assert remains() == before


@pytest.mark.parametrize("num_kvcache_blocks", [None, 8])
def test_killed_while_it_loads_the_model(
    folder: Path, num_kvcache_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 then waits for its pool size, or, where that is given, for its being ready."""
    before = remains()
    join_group = Workers.join_group
    killed_at: list[float] = []

    def join(self: Workers, *args: Any) -> Any:
        tp = join_group(self, *args)
        os.kill(self._processes[0].pid, signal.SIGKILL)
        killed_at.append(time.monotonic())
        return tp

    monkeypatch.setattr(Workers, "join_group", join)
    message = message_of_end(
        lambda: start(folder, num_kvcache_blocks=num_kvcache_blocks), killed_at=killed_at
    )
    assert "rank 1" in message and "was killed by SIGKILL" in message
    assert remains() == before


def test_an_error_at_start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank cannot load its weights: RuntimeError with its rank and traceback."""
    before = remains()
    let_rank_1_look_elsewhere(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError) as caught:
        start(folder)
    assert "rank 1 failed:\nTraceback" in str(caught.value)
    assert f"{tmp_path}: no *.safetensors files" in str(caught.value)
    assert remains() == before


@pytest.mark.parametrize(
    ("shape", "size", "number"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, 2, "num_attention_heads (3)"),
        ({"num_key_value_heads": 2, "num_attention_heads": 6}, 3, "num_key_value_heads (2)"),
        ({"intermediate_size": 98}, 4, "intermediate_size (98)"),
    ],
)
def test_case_35_what_cannot_be_divided_starts_no_process(
    tmp_path: Path, shape: dict[str, int], size: int, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, **shape)
    started: list[Any] = []
    monkeypatch.setattr(Workers, "__init__", lambda *args: started.append(args))
    with pytest.raises(ValueError) as caught:
        start(tmp_path, size=size)
    assert number in str(caught.value) and f"tensor_parallel_size={size}" in str(caught.value)
    assert not started


def test_more_ranks_than_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names both numbers, before anything is started."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    before = remains()
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2, but torch sees 1 GPU"):
        LLM(folder, tensor_parallel_size=2)
    assert remains() == before


def test_one_rank_starts_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither process nor group nor thread."""
    monkeypatch.setattr(LeadRunner, "__init__", lambda *_: pytest.fail("a LeadRunner"))
    before = remains()
    with start(folder, size=1) as llm:
        assert remains() == before
        assert llm.model_runner.tp.group is None


# --- the caller -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_the_caller_is_killed(folder: Path, mode: str, tmp_path: Path) -> None:
    """Its workers end by themselves, whether they wait for a message or for a tensor; even if a
    fork of the caller still holds the other end of their pipes."""
    shared = set(os.listdir("/dev/shm"))
    with caller(folder, mode, tmp_path) as (process, workers):
        process.kill()
        process.wait()
        wait_until_gone(workers)
    assert set(os.listdir("/dev/shm")) == shared


@pytest.mark.parametrize("mode", ["goes on", "leaves"])
def test_ctrl_c(folder: Path, mode: str, tmp_path: Path, llm: LLM) -> None:
    """A terminal sends it to all ranks. Only the caller hears it, between two steps: its engine can
    be used again, or it leaves, and the ranks leave with it. Case 36: two processes at once."""
    with caller(folder, mode, tmp_path) as (process, workers):
        expected = generate(llm)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert not any(map(is_running, workers))
    if mode == "leaves":
        assert process.returncode != 0 and err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert (process.returncode, out.strip(), err) == (0, str(expected), "")
