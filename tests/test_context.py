"""Context: there inside a step, with what the step's phase needs, and gone after it."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from recording import Watch, add

from nanovllm import LLM
from nanovllm.utils.context import Context, get_context, use_context


def some_context(slot: int = 0) -> Context:
    return Context(is_prefill=False, slot_mapping=torch.tensor([slot], dtype=torch.int32))


def assert_unset() -> None:
    with pytest.raises(RuntimeError, match="no step is running"):
        get_context()


def test_reading_it_outside_a_step_raises() -> None:
    assert_unset()


def test_it_is_current_inside_the_block_only() -> None:
    context = some_context()
    with use_context(context):
        assert get_context() is context
    assert_unset()


def test_an_error_cannot_leave_it_behind() -> None:
    with pytest.raises(KeyError), use_context(some_context()):
        raise KeyError
    assert_unset()


def test_an_inner_one_gives_way_to_the_outer_again() -> None:
    outer, inner = some_context(1), some_context(2)
    with use_context(outer):
        with use_context(inner):
            assert get_context() is inner
        assert get_context() is outer


def test_another_thread_does_not_see_it() -> None:
    """Two engines driven by two threads must not read each other's step."""
    seen: list[str] = []

    def read() -> None:
        try:
            get_context()
        except RuntimeError:
            seen.append("unset")

    with use_context(some_context()):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert seen == ["unset"]


def test_nobody_changes_it() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        some_context().is_prefill = True


def test_each_phase_of_an_engine_fills_its_fields(tmp_path: Path) -> None:
    """Whole prefill, prefill with history, decode: all tensors int32, what the phase has no use
    for is unset, and after each step there is none."""
    folder = make_checkpoint(tmp_path)
    llm = LLM(folder, device="cpu", kvcache_block_size=4, num_kvcache_blocks=16)
    watch = Watch(llm)
    add(llm, [1, 2, 3, 4, 5, 6], max_tokens=1)
    whole = watch.step().context
    assert_unset()
    add(llm, [1, 2, 3, 4, 5, 6], max_tokens=2)
    history = watch.step().context
    assert_unset()
    decode = watch.step().context
    assert_unset()

    tensors = {"slot_mapping", "cu_seqlens_q", "cu_seqlens_k", "context_lens", "block_tables"}
    for context, absent in (
        (whole, {"context_lens", "block_tables"}),
        (history, {"context_lens"}),
        (decode, {"cu_seqlens_q", "cu_seqlens_k"}),
    ):
        assert {name for name in tensors if getattr(context, name) is None} == absent
        assert {getattr(context, name).dtype for name in tensors - absent} == {torch.int32}
    assert [c.is_prefill for c in (whole, history, decode)] == [True, True, False]
    assert [(c.max_seqlen_q, c.max_seqlen_k) for c in (whole, history)] == [(6, 6), (2, 6)]
