"""What the tests of leaks share: what a process holds, and a workload of every kind of request."""

import gc
import os
import random
from pathlib import Path
from typing import NamedTuple

from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence

PAGE = os.sysconf("SC_PAGE_SIZE")


class Held(NamedTuple):
    """File descriptors and threads of this process. Linux."""

    descriptors: int
    threads: int


def held() -> Held:
    """What this process holds now, without what the garbage collector would end."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    threads = next(line for line in status.splitlines() if line.startswith("Threads:"))
    return Held(len(os.listdir("/proc/self/fd")), int(threads.split()[1]))


def resident_bytes() -> int:
    """Host memory of this process. Linux."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def live_requests() -> int:
    """Sequences and Requests that something still refers to."""
    gc.collect()
    return sum(type(thing) in (Sequence, Request) for thing in gc.get_objects())


def generate_at_random(llm: LLM, rng: random.Random, longest: int = 30) -> None:
    """One call of random size and kind: greedy or sampled, filtered, with stop strings, logprobs;
    every fifth a stream, every other one of them left early."""
    prompts = [
        [rng.randrange(llm.vocab_size) for _ in range(rng.randint(1, longest))]
        for _ in range(rng.randint(1, 8))
    ]
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.7]),
            max_tokens=rng.randint(1, 10),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1, 0.9]),
            stop=rng.choice([None, "e", ["xyz", "abc"]]),
            logprobs=rng.choice([None, 3]),
        )
        for _ in prompts
    ]
    if rng.randrange(5):
        llm.generate(prompts, params, use_tqdm=False)
        return
    for i, _ in enumerate(llm.stream(prompts, params)):
        if i == 5 and rng.randrange(2):
            break
