"""What the tests of the loop that runs a step ahead share: engines whose loops do, on the CPU too,
and the plain loop's results to hold theirs against."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_ids
from invariants import check_invariants
from recording import GREEDY

from nanovllm import LLM, SamplingParams
from nanovllm.engine.prompts import render_chat
from nanovllm.engine.request import Completion

BLOCK_SIZE = 4
SIXTEEN = SamplingParams(max_tokens=16, **GREEDY)
PROMPTS = [random_ids(count, seed=count) for count in (9, 2, 30, 5)]

Build = Callable[..., LLM]

# One of each kind of request for the bundled model. It answers chats, and ends them by EOS.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 30},
    "seeded": {"seed": 5, "max_tokens": 30},
    "filtered": {"seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "max_tokens": 25},
    "logprobs": {"seed": 7, "logprobs": 3, "max_tokens": 9},
    "max_tokens 1": {"temperature": 0, "max_tokens": 1},
    "max_tokens 2": {"temperature": 0, "max_tokens": 2},
    "stop string": {"temperature": 0, "max_tokens": 30, "stop": ["bawd"]},
    "stop id": {"temperature": 0, "max_tokens": 30, "stop_token_ids": [13]},
    "min_tokens": {"temperature": 0, "max_tokens": 40, "min_tokens": 25},
    "past its end": {"temperature": 0, "max_tokens": 40, "ignore_eos": True},
}


def chats_of_every_kind(llm: LLM, rounds: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts for the bundled model, and params that go through KINDS."""
    names = ["ROMEO", "JULIET", "KING RICHARD III"]
    params = [SamplingParams(**kind) for kind in KINDS.values()] * rounds
    chats = [[{"role": "user", "content": names[i % 3]}] for i in range(len(params))]
    return render_chat(chats, llm.tokenizer, True), params


@contextmanager
def engines_that_run_ahead(folder: Path) -> Iterator[Build]:
    """`build(path=folder, **settings)` makes one; each must be idle and free at the end."""
    with ExitStack() as engines:

        def build(path: Path = folder, **settings: Any) -> LLM:
            settings = {"num_kvcache_blocks": 64, "kvcache_block_size": BLOCK_SIZE, **settings}
            llm = engines.enter_context(LLM(path, **settings))
            llm.runs_ahead = True
            engines.callback(assert_idle, llm)
            return llm

        yield build


def assert_idle(llm: LLM) -> None:
    """No step in flight, no request left, every block free."""
    assert llm._run_ahead.in_flight is None
    assert llm.is_finished() and not llm.requests
    check_invariants(llm.scheduler)


def plain(folder: Path, prompts: Any, params: Any, **settings: Any) -> list[Completion]:
    """What the plain loop gives."""
    settings = {"num_kvcache_blocks": 64, "kvcache_block_size": BLOCK_SIZE, **settings}
    with LLM(folder, **settings) as llm:
        llm.runs_ahead = False
        return llm.generate(prompts, params, use_tqdm=False)


def completions(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def finish_by_hand(llm: LLM) -> None:
    while not llm.is_finished():
        llm.step()


def fail_at(llm: LLM, method: str, k: int, error: type[BaseException]) -> None:
    """Let the k-th call of the runner's `method` ("launch" or "collect") from now on fail."""
    call, calls = getattr(llm.model_runner, method), 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == k:
            raise error("made to fail")
        return call(*args)

    setattr(llm.model_runner, method, failing)


def assert_equal(outputs: list[Completion], expected: list[Completion]) -> None:
    """Text, tokens and reason are the same, log-probabilities within rounding."""
    for output, other in zip(outputs, expected, strict=True):
        assert {**output, "logprobs": None} == {**other, "logprobs": None}
        assert (output["logprobs"] is None) == (other["logprobs"] is None)
        for ours, theirs in zip(output["logprobs"] or [], other["logprobs"] or [], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
