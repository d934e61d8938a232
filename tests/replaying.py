"""CUDA graphs without a GPU: what would be captured is run again by each replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.engine.decode_graphs import DecodeGraphs
from nanovllm.engine.prefill_graphs import PrefillGraphs


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph."""

    captured: "FakeGraph | None" = None  # the one that is being captured

    def __init__(self) -> None:
        self.work: Callable[[], None] | None = None
        self.num_replays = 0

    def replay(self) -> None:
        assert self.work is not None, "nothing was captured"
        self.num_replays += 1
        self.work()

    def pool(self) -> tuple[int, int]:
        return 0, 0


@contextmanager
def capture(graph: FakeGraph, pool: tuple[int, int] | None = None) -> Iterator[None]:
    """Stands for torch.cuda.graph: nothing runs, the `_step` called inside is remembered."""
    FakeGraph.captured = graph
    try:
        yield
    finally:
        FakeGraph.captured = None


def fake_capture(
    monkeypatch: pytest.MonkeyPatch, step: Callable[[Any, int], None] | None = None
) -> None:
    """Let DecodeGraphs and PrefillGraphs work on the CPU. `step(graphs, size)` replaces what one
    step of a graph computes; without it the model and the kernels run, these in Triton's
    interpreter."""
    for owner in (DecodeGraphs, PrefillGraphs):
        work = step or owner._step

        def on_step(self: Any, size: int, work: Callable[[Any, int], None] = work) -> None:
            if FakeGraph.captured is None:
                work(self, size)
            else:
                FakeGraph.captured.work = partial(work, self, size)

        monkeypatch.setattr(owner, "_step", on_step)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


def add_graphs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a CPU engine graphs for decode and short prefills, and let its loops run ahead."""
    fake_capture(monkeypatch)
    llm.model_runner._capture_graphs(with_prefill=True)
    llm.runs_ahead = True
