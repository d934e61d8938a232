"""Memory, file descriptors and threads that come back; test_gpu_memory.py does it on a GPU."""

import random
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from resources import generate_at_random, held, live_requests, resident_bytes

from nanovllm import LLM

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 1 << 20


def test_a_hundred_calls_do_not_grow_host_memory(wide_tq: Path) -> None:
    """After 30 calls to warm up, 100 more leave no request behind and add at most 8 MiB: 80 KiB a
    call would be seen, and the allocator's own movements are below that."""
    rng = random.Random(0)
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 30, "max_num_batched_tokens": 64}
    with LLM(wide_tq, device="cpu", **settings) as llm:
        for _ in range(30):
            generate_at_random(llm, rng)
        before, requests_before = resident_bytes(), live_requests()
        for _ in range(100):
            generate_at_random(llm, rng)
        assert live_requests() == requests_before
        assert resident_bytes() - before < 8 * MIB
        assert llm.stats()["preemptions"] > 0 and llm.stats()["prefix_hit_tokens"] > 0


def test_case_36_twenty_engines_leave_nothing_behind(wide_tq: Path) -> None:
    """File descriptors and threads exactly as after the first engines; of 20 models of 1.4 MiB at
    most 8 MiB in all. (The pool is small, as the allocator keeps a large one or two for itself.)"""
    rng = random.Random(0)

    def build_and_exit() -> None:
        with LLM(wide_tq, device="cpu", kvcache_block_size=4, num_kvcache_blocks=64) as llm:
            generate_at_random(llm, rng)

    for _ in range(3):
        build_and_exit()
    before, bytes_before = held(), resident_bytes()
    for _ in range(20):
        build_and_exit()
    assert held() == before
    assert resident_bytes() - bytes_before < 8 * MIB


def test_twenty_failed_starts_leave_nothing_behind(tmp_path: Path) -> None:
    """With weights that end in the middle: files are open by then."""
    broken = make_checkpoint(tmp_path / "broken")
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    def fail() -> None:
        with pytest.raises(ValueError, match="is the download complete"):
            LLM(broken, device="cpu", num_kvcache_blocks=4)

    for _ in range(2):
        fail()
    before, bytes_before = held(), resident_bytes()
    for _ in range(20):
        fail()
    assert held() == before
    assert resident_bytes() - bytes_before < 8 * MIB
