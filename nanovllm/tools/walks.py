"""Walks: short runs with known numbers, each showing one thing that the engine does."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.tools.events import Step
from nanovllm.tools.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that joins before step `step`, counted from 1. It never ends early."""

    prompt: str | list[int]
    max_tokens: int
    step: int = 1
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Walk:
    """Requests in the order of their arrival, and the engine to run them on. `first_blocks` are
    moved to the front of the free queue, so that block tables are not just 0, 1, 2."""

    title: str
    arrivals: list[Arrival]
    settings: dict[str, Any] = field(default_factory=dict)
    first_blocks: tuple[int, ...] = ()

    def steps(self, llm: LLM, shapes: bool = False) -> Iterator[Step]:
        """Run on an engine that was built with `settings` and has nothing to do yet."""
        free = llm.scheduler.block_manager.free_block_ids
        for block_id in reversed(self.first_blocks):
            free.move_to_end(block_id, last=False)
        coming = deque(self.arrivals)
        with Tracer(llm, shapes) as tracer:
            while coming or not llm.is_finished():
                # Should all be finished early, the next one need not wait for its step.
                while coming and (coming[0].step <= tracer.num_steps + 1 or llm.is_finished()):
                    arrival = coming.popleft()
                    params = SamplingParams(
                        temperature=arrival.temperature,
                        max_tokens=arrival.max_tokens,
                        ignore_eos=True,
                    )
                    llm.add_request(arrival.prompt, params)
                yield tracer.step()


def _ids(count: int, seed: int) -> list[int]:
    """Ids below 701, which any vocabulary holds."""
    return Random(seed).choices(range(701), k=count)


def _shared(count: int, shared: list[int], seed: int) -> list[int]:
    """`count` ids of which the first are `shared` and the next one surely differs."""
    return [*shared, 700 - shared[-1], *_ids(count - len(shared) - 1, seed)]


_BIG = {"kvcache_block_size": 256, "num_kvcache_blocks": 32}
_LONG = _ids(620, 5)  # shares its first two blocks
_TWIN = _ids(512, 7)
_FIRST = _ids(17, 11)

WALKS = {
    "A": Walk("one request", [Arrival([100, 200, 300], 3)], _BIG),
    "B": Walk(
        "two requests, one of which finishes early",
        [Arrival([1, 2, 3], 2), Arrival([4, 5, 6, 7], 5)],
        {**_BIG, "max_num_seqs": 2},
    ),
    "C": Walk("a prompt of exactly one block", [Arrival(_ids(256, 1), 3)], _BIG),
    "lifecycle": Walk(
        "two prompts in one step, without padding",
        [Arrival(_ids(64, 1), 2), Arrival(_ids(96, 2), 3)],
        _BIG,
    ),
    "chunk": Walk(
        "a prompt longer than a step's budget, in chunks",
        [Arrival(_ids(700, 3), 2), Arrival(_ids(32, 4), 2)],
        {**_BIG, "max_num_batched_tokens": 512},
        first_blocks=(17, 5, 23, 11),
    ),
    "prefix": Walk(
        "prompts that share a prefix, and its blocks",
        [
            Arrival(_LONG, 2),
            Arrival(_shared(620, _LONG[:512], 6), 3, step=3),  # A is done: its blocks are free
            Arrival(_LONG, 4, step=4),  # B is not: the shared blocks have two owners
            Arrival(_TWIN, 1, step=8),
            Arrival(_TWIN, 1, step=9),  # both its blocks are stored, but only one may hit
        ],
        _BIG,
    ),
    "preempt": Walk(
        "three requests outgrow a pool of four blocks",
        [Arrival(_ids(4, 8 + i), 3) for i in range(3)],
        {"kvcache_block_size": 4, "num_kvcache_blocks": 4},
    ),
    "tour": Walk(
        "chunks, a shared prefix, preemption, late arrivals",
        [
            Arrival(_FIRST, 9),
            Arrival(_ids(6, 12), 5),
            Arrival(_shared(12, _FIRST[:8], 13), 8, step=4),
            Arrival(_ids(9, 14), 4, step=6),
        ],
        {"kvcache_block_size": 4, "num_kvcache_blocks": 12, "max_num_batched_tokens": 10},
    ),
}
