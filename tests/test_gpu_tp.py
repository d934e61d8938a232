"""Tensor parallel on two GPUs, over NCCL and symmetric memory, in CUDA graphs and without: equal to
one GPU within bfloat16's own error; a rank that dies while the GPUs wait for each other."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, random_ids
from processes import (
    caller,
    damage_messages,
    is_running,
    let_rank_1_be_killed_at_the_meeting_point,
    let_rank_1_look_elsewhere,
    remains,
    wait_until_gone,
)

from nanovllm import LLM, SamplingParams
from nanovllm.tools.forced import TokenPath, run_forced

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPE = {
    "vocab_size": 1027,  # padded on two ranks
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
PROMPTS = [random_ids(count, 1027, seed=count) for count in (5, 300, 40, 700)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpu"), dtype=torch.bfloat16, **SHAPE)


def start(folder: Path, size: int = 2, **settings: Any) -> LLM:
    settings = {"num_kvcache_blocks": 128, "max_num_seqs": 16, **settings}
    return LLM(folder, device="cuda", tensor_parallel_size=size, **settings)


@pytest.fixture(scope="module")
def paths() -> list[TokenPath]:
    return [
        TokenPath(prompt + random_ids(8, 1027, seed=i), len(prompt))
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def tolerance_and_reference(
    folder: Path, paths: list[TokenPath]
) -> tuple[float, list[torch.Tensor]]:
    """One GPU in float32, and how far one GPU in bfloat16 is from it, relative L2, doubled."""
    with start(folder, size=1, dtype="float32") as llm:
        exact = run_forced(llm, paths).logits
    with start(folder, size=1) as llm:
        rounded = run_forced(llm, paths).logits
    return 2 * relative_l2(rounded, exact), exact


def relative_l2(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    difference = torch.cat(a) - torch.cat(b)
    return float(difference.norm() / torch.cat(b).norm())


@pytest.mark.parametrize("budget", [16384, 256])
def test_logits_as_on_one_gpu(
    folder: Path,
    paths: list[TokenPath],
    budget: int,
    tolerance_and_reference: tuple[float, list[torch.Tensor]],
) -> None:
    """Whole prompts, whose sums are NCCL's, and chunks of 256, summed in symmetric memory."""
    tolerance, exact = tolerance_and_reference
    with start(folder, enforce_eager=True, max_num_batched_tokens=budget) as llm:
        assert relative_l2(run_forced(llm, paths).logits, exact) <= tolerance


def test_graphs_equal_eager(folder: Path) -> None:
    """The collectives and the broadcast of the sampled ids are in the graphs: in float32, where no
    near-tie falls the other way, both loops give the same tokens."""
    settings = {"dtype": "float32"}
    with start(folder, enforce_eager=True, **settings) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with start(folder, **settings) as llm:
        for runs_ahead in (True, False):
            llm.runs_ahead = runs_ahead
            assert llm.generate(PROMPTS, PARAMS, use_tqdm=False) == expected
        assert llm.stats()["graph_replays"] > 0 and llm.stats()["graph_misses"] == 0


def test_sampling_controls_in_graphs(folder: Path) -> None:
    """Rows that need more than the graph are sampled again, on rank 0, and every rank knows."""
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=2, top_k=5, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=3, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, top_p=0.8, max_tokens=16, ignore_eos=True),
    ]
    outputs = []
    for size in (1, 2):
        with start(folder, size=size, dtype="float32") as llm:
            outputs.append(llm.generate(PROMPTS, params, use_tqdm=False))
    assert [o["token_ids"] for o in outputs[0]] == [o["token_ids"] for o in outputs[1]]


def test_symmetric_memory_is_used_where_it_is_there(folder: Path) -> None:
    """By a second engine of this process too."""
    for _ in range(2):
        with start(folder) as llm:
            symmetric = llm.model_runner.tp.group.symmetric
            assert symmetric is not None, "NCCL serves all; the log at INFO says why"
            assert symmetric.handle.multicast_ptr == 0, "NVLink multicast must stay off"


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_a_rank_is_killed(folder: Path, enforce_eager: bool) -> None:
    """While rank 0's GPU waits for it in a sum, of NCCL in the prefill of 1,045 positions, in
    symmetric memory in decode, within 10 seconds; then a new engine, in the same process, finds the
    memory free and gives the same tokens."""
    settings = {"enforce_eager": enforce_eager, "dtype": "float32", "num_kvcache_blocks": None}
    settings["gpu_memory_utilization"] = 0.6  # two at once would not fit
    llm = start(folder, **settings)
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for phase in ("prefill", "decode", "idle"):
        kill(llm, phase)
        llm = start(folder, **settings)
        assert llm.generate(PROMPTS, PARAMS, use_tqdm=False) == expected, phase
    llm.exit()


def kill(llm: LLM, phase: str) -> None:
    """Rank 1, and see the engine end."""
    process = llm.model_runner._workers._processes[0]
    stream = llm.stream(PROMPTS, PARAMS)
    if phase == "decode":
        next(stream)
    if phase == "idle":
        process.kill()
        process.join()
    else:
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(1, os.kill, (process.pid, signal.SIGKILL)).start()
    before = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 .* was killed by SIGKILL"):
        list(stream)
    assert time.monotonic() - before < 10, phase


@pytest.fixture(scope="module")
def kept_by_cuda(folder: Path) -> None:
    """An engine has run: what CUDA and NCCL load for it, a process keeps."""
    with start(folder) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.usefixtures("kept_by_cuda")
def test_memory_is_given_back(folder: Path) -> None:
    """On both GPUs, to within what CUDA keeps per process."""
    free = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    for _ in range(2):
        with start(folder) as llm:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for i in range(2):
        assert free[i] - torch.cuda.mem_get_info(i)[0] < 600 << 20


# --- other ends: what the tests of several ranks do on the CPU, on GPUs ---------------------------


@pytest.fixture
def all_memory_free(kept_by_cuda: None) -> Iterator[None]:
    """No GPU has less free after the test than before, but for what CUDA keeps per process."""
    free = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    yield
    deadline = time.monotonic() + 10  # a process that was killed gives it back within moments
    while any(free[i] - torch.cuda.mem_get_info(i)[0] > 600 << 20 for i in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.usefixtures("all_memory_free")
def test_a_rank_fails_at_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no weights: its rank and traceback within seconds of that, and nothing is left."""
    before = remains()
    let_rank_1_look_elsewhere(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:\nTraceback.*no \*\.safetensors"):
        start(folder)
    assert remains() == before


@pytest.mark.usefixtures("all_memory_free")
def test_a_rank_is_killed_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While rank 0 waits for it at the meeting point."""
    before = remains()
    let_rank_1_be_killed_at_the_meeting_point(monkeypatch)
    with pytest.raises(RuntimeError, match=r"rank 1 .* was killed by SIGKILL"):
        start(folder)
    assert remains() == before


@pytest.mark.usefixtures("all_memory_free")
def test_a_rank_whose_kernel_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decodes from a block far beyond its pool, and rank 0's GPU waits for it in a sum: the
    caller gets its traceback within 10 seconds, and can build a new engine."""
    llm = start(folder, enforce_eager=True)
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for prompt in PROMPTS:
        llm.add_request(prompt, PARAMS)
    assert llm.step()[1] > 0  # FlashAttention, in prefill, would end the process by itself
    damage_messages(llm, monkeypatch)
    before = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:\nTraceback.*illegal memory access"):
        llm.step()
    assert time.monotonic() - before < 10
    with start(folder, enforce_eager=True) as llm:
        assert llm.generate(PROMPTS, PARAMS, use_tqdm=False) == expected


@pytest.mark.usefixtures("all_memory_free")
@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_the_caller_is_killed(folder: Path, mode: str, tmp_path: Path) -> None:
    """Its ranks end by themselves, also while a GPU waits in a sum."""
    shared = set(os.listdir("/dev/shm"))
    with caller(folder, mode, tmp_path, device="cuda") as (process, workers):
        process.kill()
        process.wait()
        wait_until_gone(workers)
    assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.usefixtures("all_memory_free")
@pytest.mark.parametrize("mode", ["goes on", "leaves"])
def test_ctrl_c(folder: Path, mode: str, tmp_path: Path) -> None:
    """The engine can be used again, or it leaves, and the ranks leave with it."""
    with caller(folder, mode, tmp_path, device="cuda") as (process, workers):
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert not any(map(is_running, workers))
    if mode == "leaves":
        assert process.returncode != 0 and err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert process.returncode == 0 and out.count("[[") == 1, err
