"""Tensor parallel: a rank that fails or dies, a caller that dies, Ctrl-C. Nobody waits for ever,
the caller learns which rank it was and why, and nothing is left.

An engine that a test has broken is replaced in the same process for the next test, and has to work.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from recording import GREEDY

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.lead_runner import LeadRunner
from nanovllm.engine.workers import Report, Workers

ROOT = Path(__file__).parents[1]
BOUND = 10  # seconds in which whoever lost a process must know
PROMPTS = [[1, 2, 3, 4, 5], [6, 7]]
PARAMS = SamplingParams(max_tokens=4, **GREEDY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def start(folder: Path, size: int = 2, **settings: Any) -> LLM:
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 64, **settings}
    return LLM(folder, device="cpu", tensor_parallel_size=size, **settings)


def generate(llm: LLM) -> list[list[int]]:
    return [out["token_ids"] for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The completions of one rank."""
    with start(folder, size=1) as llm:
        return generate(llm)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLM]]:
    running: list[LLM] = []
    yield running
    for llm in running:
        llm.exit()


@pytest.fixture
def llm(folder: Path, engines: list[LLM], expected: list[list[int]]) -> LLM:
    """A working engine of two ranks; a new one if the test before broke it."""
    if engines and engines[0].model_runner._workers.failure is not None:
        engines.pop()  # without exit(): it has ended by itself
    if not engines:
        engines.append(start(folder))
    llm = engines[0]
    llm.runs_ahead = False
    assert generate(llm) == expected
    return llm


def worker(llm: LLM, rank: int = 1) -> BaseProcess:
    return llm.model_runner._workers._processes[rank - 1]


def kill(process: BaseProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@contextmanager
def killed_while_waited_for(process: BaseProcess) -> Iterator[None]:
    """The process stops taking part, so that the others wait for it, and is killed a second on."""
    os.kill(process.pid, signal.SIGSTOP)
    timer = threading.Timer(1, os.kill, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def message_of_end(
    call: Callable[[], Any], llm: LLM | None = None, killed_at: list[float] | None = None
) -> str:
    """`call` must raise RuntimeError in time; its message. The engine's memory is free by then,
    though the error, and so its traceback, is still there."""
    left = [] if llm is None else [weakref.ref(llm.model_runner.model)]
    begin = [time.monotonic()] if killed_at is None else killed_at
    with pytest.raises(RuntimeError) as caught:
        call()
    assert time.monotonic() - begin[0] < BOUND
    assert not any(ref() for ref in left)
    return str(caught.value)


def assert_ended(llm: LLM, pids: list[int]) -> None:
    """All ranks are gone, the memory of rank 0 is free, and every use says why; exit() is quiet."""
    assert not any(map(is_running, pids))
    assert not {child.pid for child in multiprocessing.active_children()} & set(pids)
    assert llm.model_runner.model is None and llm.model_runner.kv_cache is None
    assert "nanovllm-watch" not in {
        t.name for t in threading.enumerate() if t.ident in watches(llm)
    }
    failure = llm.model_runner._workers.failure
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            generate(llm)
        assert str(caught.value) == failure
    assert llm.is_finished()
    llm.exit()
    llm.exit()


def watches(llm: LLM) -> set[int | None]:
    return {llm.model_runner._workers._watch_thread.ident}


def is_running(pid: int) -> bool:
    """A process that has ended but was not waited for (by init, say) runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + BOUND
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.05)


# --- a worker raises ------------------------------------------------------------------------------


def damage_messages(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a worker, but not rank 0, is told of a block that does not exist."""
    write = llm.model_runner._steps.write

    def damaged(seqs: list[Any], is_prefill: bool) -> Any:
        tables = [seq.block_table for seq in seqs]
        for seq in seqs:
            seq.block_table = [10**6] * len(seq.block_table)
        message = write(seqs, is_prefill)
        for seq, table in zip(seqs, tables, strict=True):
            seq.block_table = table
        return message

    monkeypatch.setattr(llm.model_runner._steps, "write", damaged)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_worker_that_raises(llm: LLM, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets its rank and its traceback, whatever rank 0 met by losing it."""
    pids = [worker(llm).pid]
    llm.add_request(PROMPTS[0], PARAMS)
    if phase == "decode":
        llm.step()
    damage_messages(llm, monkeypatch)
    message = message_of_end(llm.step)
    assert message.startswith("the engine has ended, rank 1 failed:\nTraceback")
    assert "model_runner.py" in message and "IndexError" in message
    llm.abort(llm.scheduler.waiting[0].seq_id)  # the step was undone
    assert_ended(llm, pids)


def test_rank_0_that_raises(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error reaches the caller as it was raised; the ranks are out of step, so all end."""
    pids = [worker(llm).pid]

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of rank 0")

    monkeypatch.setattr(llm.model_runner, "_sampled_ids", fail)
    with pytest.raises(ZeroDivisionError, match="of rank 0"):
        generate(llm)
    assert "rank 0 failed: ZeroDivisionError" in llm.model_runner._workers.failure
    assert_ended(llm, pids)


# --- a worker is killed ---------------------------------------------------------------------------


def test_killed_when_idle(llm: LLM) -> None:
    pids = [worker(llm).pid]
    kill(worker(llm))
    message = message_of_end(lambda: generate(llm))
    assert f"rank 1 (process {pids[0]}) was killed by SIGKILL" in message
    assert_ended(llm, pids)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain loop", "ahead"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_killed_while_rank_0_waits_for_it(llm: LLM, phase: str, runs_ahead: bool) -> None:
    """In the midst of a collective of a prefill or decode step."""
    pids = [worker(llm).pid]
    llm.runs_ahead = runs_ahead
    stream = llm.stream(PROMPTS, PARAMS)
    if phase == "decode":
        next(stream)
    with killed_while_waited_for(worker(llm)):
        message = message_of_end(lambda: list(stream), llm)
    assert f"rank 1 (process {pids[0]}) was killed by SIGKILL" in message
    assert_ended(llm, pids)


@pytest.mark.parametrize("phase", ["idle", "decode"])
def test_killed_one_of_four(folder: Path, expected: list[list[int]], phase: str) -> None:
    """The rank that was killed is named, not one of those that lost it; all the others end, though
    nobody uses the engine."""
    llm = start(folder, size=4)
    assert generate(llm) == expected
    pids = [worker(llm, rank).pid for rank in (1, 2, 3)]
    llm.add_request(PROMPTS[0], PARAMS)
    llm.step()
    if phase == "idle":
        kill(worker(llm, 2))
        wait_until_gone(pids)
        message = message_of_end(llm.step)
    else:
        with killed_while_waited_for(worker(llm, 2)):
            message = message_of_end(llm.step)
    assert f"rank 2 (process {pids[1]}) was killed by SIGKILL" in message
    llm.abort(llm.scheduler.waiting[0].seq_id)
    assert_ended(llm, pids)


@pytest.mark.parametrize("last", ["killed", "raised"])
def test_the_first_cause_is_named(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks are lost at the same moment: the one that was killed before those that report to
    have lost a peer, else the one that reported first."""
    ends = [multiprocessing.Pipe() for _ in range(3)]
    ends[0][1].send(Report(9.0, "lost a peer"))
    ends[1][1].send(Report(8.0, "the cause"))
    if last == "raised":
        ends[2][1].send(Report(10.0, "lost a peer"))
    for _, theirs in ends:
        theirs.close()
    workers = object.__new__(Workers)
    workers._pipes = [ours for ours, _ in ends]
    reasons: list[str] = []
    monkeypatch.setattr(Workers, "_how_it_died", lambda self, rank: f"rank {rank} was killed")
    monkeypatch.setattr(Workers, "_stop", lambda self, reason: reasons.append(reason))
    workers._watch()
    first = "rank 3 was killed" if last == "killed" else "rank 2 failed:\nthe cause"
    assert reasons == [first]


# --- start ----------------------------------------------------------------------------------------


def remains() -> tuple[set[Any], set[threading.Thread], set[str]]:
    """What a half-started engine could leave: processes, threads, shared memory."""
    children, threads = multiprocessing.active_children(), threading.enumerate()
    return set(children), set(threads), set(os.listdir("/dev/shm"))


def test_killed_as_soon_as_it_is_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While Python itself starts in it, and rank 0 waits for it at the meeting point."""
    before = remains()
    join_group = Workers.join_group

    def join(self: Workers, *args: Any) -> Any:
        with killed_while_waited_for(self._processes[0]):
            return join_group(self, *args)

    monkeypatch.setattr(Workers, "join_group", join)
    assert "rank 1" in (message := message_of_end(lambda: start(folder)))
    assert "was killed by SIGKILL" in message
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
    init = Workers.__init__

    def elsewhere(self: Workers, config: Config, *args: Any) -> None:
        init(self, replace(config, model=str(tmp_path)), *args)

    monkeypatch.setattr(Workers, "__init__", elsewhere)
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

# Without `if __name__ == "__main__"`, which spawned processes would otherwise need.
SCRIPT = """
import multiprocessing, sys, time
from nanovllm import LLM, SamplingParams
folder, mode = sys.argv[1:]
llm = LLM(folder, device="cpu", tensor_parallel_size=2, kvcache_block_size=4,
          num_kvcache_blocks=200)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
try:
    while mode != "idle":
        llm.generate([[1, 2, 3]], long, use_tqdm=False)
    time.sleep(600)
except KeyboardInterrupt:
    if mode == "leaves":
        raise
    outputs = llm.generate([[1, 2, 3, 4, 5], [6, 7]], short, use_tqdm=False)
    print([output["token_ids"] for output in outputs], flush=True)
"""


@contextmanager
def caller(
    folder: Path, mode: str, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A script with an engine of two ranks, in a session of its own as under a terminal, and the
    ids of its workers. An engine of this process goes on beside it."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, str(path), str(folder), mode]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        workers = list(map(int, process.stdout.readline().split()))
        assert len(workers) == 1 and is_running(workers[0])
        time.sleep(0.5)  # well into the loop
        yield process, workers
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_the_caller_is_killed(folder: Path, mode: str, tmp_path: Path) -> None:
    """Its workers end by themselves, whether they wait for a message or for a tensor."""
    shared = set(os.listdir("/dev/shm"))
    with caller(folder, mode, tmp_path) as (process, workers):
        process.kill()
        process.wait()
        wait_until_gone(workers)
    assert set(os.listdir("/dev/shm")) == shared


def test_the_caller_is_killed_while_a_worker_waits_for_nobody(folder: Path, tmp_path: Path) -> None:
    """Nor does it help a worker that the pipe is still open, in a copy that a fork made."""
    code = SCRIPT.replace("try:", "import os\nif os.fork() == 0:\n    time.sleep(600)\ntry:", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "SCRIPT", code)
        with caller(folder, "idle", tmp_path) as (process, workers):
            process.kill()
            process.wait()
            wait_until_gone(workers)
            os.killpg(process.pid, signal.SIGKILL)  # the fork


@pytest.mark.parametrize("mode", ["idle", "goes on", "leaves"])
def test_ctrl_c(
    folder: Path, mode: str, tmp_path: Path, llm: LLM, expected: list[list[int]]
) -> None:
    """A terminal sends it to all ranks. Only the caller hears it, between two steps: its engine can
    be used again, or it leaves, and the ranks leave with it. Case 36: two processes at once."""
    with caller(folder, mode, tmp_path) as (process, workers):
        assert generate(llm) == expected
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert not any(map(is_running, workers))
    if mode == "leaves":
        assert process.returncode != 0 and err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert (process.returncode, out.strip(), err) == (0, str(expected), "")
