"""What the tests of streams share: prompts, an engine with a small pool, and increments joined."""

from pathlib import Path
from typing import Any

from checkpoints import random_ids
from invariants import check_invariants
from recording import GREEDY

from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import Increment

SIXTEEN = SamplingParams(max_tokens=16, **GREEDY)
PROMPTS = [random_ids(count, seed=count) for count in (9, 2, 30, 5)]


def start_small(folder: Path, **settings: Any) -> LLM:
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 64, **settings}
    return LLM(folder, device="cpu", **settings)


def joined(increments: list[Increment], index: int) -> tuple[str, list[int], list[str | None]]:
    """(text, token_ids, finish reasons) of one prompt's increments, put together."""
    own = [increment for increment in increments if increment["index"] == index]
    text = "".join(increment["text"] for increment in own)
    token_ids = [token_id for increment in own for token_id in increment["token_ids"]]
    return text, token_ids, [increment["finish_reason"] for increment in own]


def assert_clean(llm: LLM, expected: list[list[int]]) -> None:
    """Nothing lives, the pool is free, and the engine gives what a fresh one gives."""
    check_invariants(llm.scheduler)
    assert llm.is_finished() and not llm.requests
    assert len(llm.scheduler.block_manager.free_block_ids) == 64
    outputs = llm.generate(PROMPTS, SIXTEEN, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == expected
