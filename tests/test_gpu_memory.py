"""GPU: memory and file descriptors that come back, and what a GPU engine tells of itself."""

import gc
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from resources import generate_at_random, held, live_requests, resident_bytes

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=2048, head_dim=64)


def start(folder: Path, **settings: Any) -> LLM:
    settings = {"num_kvcache_blocks": 64, "max_num_seqs": 16, **settings}
    return LLM(folder, device="cuda", dtype="bfloat16", **settings)


def gpu_free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_case_36_twenty_engines_leave_gpu_memory_and_descriptors_where_they_were(
    folder: Path,
) -> None:
    """With graphs, each engine: after two to warm up (libraries keep workspaces), allocated bytes
    are exactly the same, and the driver's free memory within 64 MiB."""
    rng = random.Random(0)

    def build_and_exit() -> None:
        with start(folder) as llm:
            generate_at_random(llm, rng)

    for _ in range(2):
        build_and_exit()
    free, allocated, before = gpu_free_bytes(), torch.cuda.memory_allocated(), held()
    for _ in range(20):
        build_and_exit()
    assert torch.cuda.memory_allocated() == allocated
    assert abs(free - gpu_free_bytes()) < 64 * MIB
    assert held() == before


def test_a_hundred_calls_grow_neither_memory(folder: Path) -> None:
    """Host: at most 16 MiB, no request left. GPU: not a byte allocated."""
    rng = random.Random(0)
    with start(folder) as llm:
        for _ in range(30):
            generate_at_random(llm, rng, longest=300)
        gc.collect()
        host, requests, gpu = resident_bytes(), live_requests(), torch.cuda.memory_allocated()
        for _ in range(100):
            generate_at_random(llm, rng, longest=300)
        gc.collect()
        assert torch.cuda.memory_allocated() == gpu
        assert live_requests() == requests
        assert resident_bytes() - host < 16 * MIB


def test_one_line_at_info(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And nothing else; without flash-attn a warning gives the reason for the fall-back."""
    with caplog.at_level(logging.INFO, logger="nanovllm"), start(folder) as llm:
        layer = llm.model_runner.model.model.layers[0].self_attn.attn
        attention = layer.attention.__name__
    records = [r for r in caplog.records if r.name.startswith("nanovllm")]
    fell_back = attention == "torch_attention"
    assert [r.levelname for r in records] == (["WARNING", "INFO"] if fell_back else ["INFO"])
    assert records[-1].getMessage() == (
        f"{attention}, torch.bfloat16 on cuda:0, CUDA graphs on, 64 KV blocks (16384 tokens), "
        "world size 1"
    )


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_stats_count_graph_replays_and_misses(folder: Path, enforce_eager: bool) -> None:
    with start(folder, enforce_eager=enforce_eager) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        llm.generate([[1, 2], [3]], params, use_tqdm=False)
        counts = llm.stats()["graph_replays"], llm.stats()["graph_misses"]
        assert counts == ((0, 5) if llm.model_runner.graphs is None else (5, 0))
