"""Tracer: what each step of a running engine does, noted from outside.

It drives `llm.step()` and, while it is open, listens at a few methods of that one engine's
scheduler and runner. The engine has no hooks for it: an engine that is not traced pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch

from nanovllm import LLM
from nanovllm.engine.inputs import StepInputs, decode_inputs, prefill_inputs
from nanovllm.engine.sequence import Sequence
from nanovllm.tools import replaced
from nanovllm.tools.events import (
    AfterPostprocess,
    BeforeSchedule,
    Hit,
    Inputs,
    Outcome,
    Preemption,
    RequestState,
    Scheduled,
    Step,
    TensorValue,
    letters,
)

MOST_VALUES = 4096  # of a tensor larger than this only the shape is kept


class Tracer:
    """`with Tracer(llm) as tracer: tracer.step()`; outside the block the engine is as before."""

    def __init__(self, llm: LLM, shapes: bool = False) -> None:
        """shapes: note layer-0 tensor shapes as well (none where a CUDA graph replays)."""
        self.llm = llm
        self.shapes = shapes
        self.num_steps = 0
        self._names: dict[int, str] = {}  # by seq_id
        self._before: dict[str, RequestState] = {}
        self._seen: dict[str, Any] = {}
        self._hits: list[Hit] = []
        self._preempted: list[Preemption] = []
        self._needed_by: Sequence | None = None
        self._layers: list[tuple[str, list[list[int]], list[int]]] = []
        self._open = ExitStack()

    def __enter__(self) -> Tracer:
        scheduler, runner = self.llm.scheduler, self.llm.model_runner
        for owner, name, note in (
            (scheduler, "schedule", self._on_schedule),
            (scheduler, "preempt", self._on_preempt),
            (scheduler.block_manager, "allocate", self._on_allocate),
            (scheduler.block_manager, "can_append", self._on_can_append),
            (runner, "run", self._on_run),
        ):
            method = _noting(getattr(owner, name), note)
            self._open.enter_context(replaced(owner, name, method))
        for name, module in runner.model.named_modules() if self.shapes else ():
            is_first_layer, is_leaf = ".layers.0." in name, not any(module.children())
            if is_leaf and (is_first_layer or name.endswith(("embed_tokens", "lm_head"))):
                label = name.split(".layers.0.")[-1].removeprefix("model.")
                hook = module.register_forward_hook(self._on_forward(label))
                self._open.callback(hook.remove)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def step(self) -> Step:
        """Run one step of the engine, which must have something to do."""
        scheduler = self.llm.scheduler
        self._hits, self._preempted, self._layers = [], [], []
        live = sorted([*scheduler.waiting, *scheduler.running], key=lambda seq: seq.seq_id)
        for seq in live:
            self._names.setdefault(seq.seq_id, letters(len(self._names)))
        before = BeforeSchedule(
            [self._state(seq) for seq in scheduler.waiting],
            [self._state(seq) for seq in scheduler.running],
            self._num_free(),
        )
        self._before = {state.name: state for state in (*before.waiting, *before.running)}
        self.llm.step()
        self.num_steps += 1
        seqs, scheduled = self._seen["seqs"], self._seen["scheduled"]
        return Step(self.num_steps, before, scheduled, self._seen["inputs"], self._after(seqs))

    # --- what is listened to, each after the method returned ---

    def _on_can_append(self, possible: bool, seq: Sequence) -> None:
        if not possible:
            self._needed_by = seq

    def _on_preempt(self, _: None, seq: Sequence) -> None:
        name = self._name(seq)
        by = self._name(self._needed_by) if self._needed_by else name
        # Its table is gone; it did not change since the step began, as it was not yet chosen.
        self._preempted.append(Preemption(name, by, self._before[name].block_table))

    def _on_allocate(self, _: None, seq: Sequence, num_cached_blocks: int) -> None:
        if num_cached_blocks:
            blocks = seq.block_table[:num_cached_blocks]
            self._hits.append(Hit(self._name(seq), blocks, seq.num_cached_tokens))

    def _on_schedule(self, batch: tuple[list[Sequence], bool]) -> None:
        seqs, is_prefill = batch
        scheduler = self.llm.scheduler
        others = [s for s in (*scheduler.running, *scheduler.waiting) if s not in seqs]
        self._seen["seqs"] = list(seqs)
        self._seen["scheduled"] = Scheduled(
            "prefill" if is_prefill else "decode",
            [self._state(seq) for seq in seqs],
            [self._state(seq) for seq in others],
            self._hits,
            self._preempted,
            self._num_free(),
            self._reusable(),
        )

    def _on_run(self, token_ids: list[int], seqs: list[Sequence], is_prefill: bool) -> None:
        # Built once more, on the host: the engine's own may live in buffers of a GPU.
        build = prefill_inputs if is_prefill else decode_inputs
        inputs = build(seqs, torch.device("cpu"))
        self._seen.update(token_ids=token_ids, inputs=_describe(inputs, self._layers))

    def _on_forward(self, label: str) -> Callable[[Any, tuple[Any, ...], Any], None]:
        def note(module: Any, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, torch.Tensor):
                shapes = [list(x.shape) for x in args if isinstance(x, torch.Tensor)]
                self._layers.append((label, shapes, list(output.shape)))

        return note

    # --- snapshots ---

    def _after(self, seqs: list[Sequence]) -> AfterPostprocess:
        manager = self.llm.scheduler.block_manager
        outcomes = []
        chosen = self._seen["scheduled"].chosen
        for seq, state, token_id in zip(seqs, chosen, self._seen["token_ids"], strict=True):
            accepted = state.cached + state.scheduled == state.total
            text = self.llm.tokenizer.decode([token_id])
            outcomes.append(Outcome(state.name, token_id, text, accepted, seq.finish_reason))
        return AfterPostprocess(
            [self._state(seq) for seq in seqs],
            outcomes,
            {i: manager.blocks[i].ref_count for i in sorted(manager.used_block_ids)},
            self._num_free(),
            self._reusable(),
        )

    def _name(self, seq: Sequence) -> str:
        return self._names[seq.seq_id]

    def _state(self, seq: Sequence) -> RequestState:
        return RequestState(
            self._name(seq),
            seq.status.name,
            seq.num_tokens,
            seq.num_cached_tokens,
            seq.num_scheduled_tokens,
            seq.num_blocks,
            list(seq.block_table),
        )

    def _num_free(self) -> int:
        return len(self.llm.scheduler.block_manager.free_block_ids)

    def _reusable(self) -> list[int]:
        manager = self.llm.scheduler.block_manager
        return sorted(i for i in manager.hash_to_block_id.values() if i in manager.free_block_ids)


def _noting(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """`method`, but `note(result, *args)` follows each call."""

    def noted(*args: Any) -> Any:
        result = method(*args)
        note(result, *args)
        return result

    return noted


def _describe(inputs: StepInputs, shapes: list[Any]) -> Inputs:
    context = inputs.context
    found = {"input_ids": inputs.input_ids, "positions": inputs.positions}
    found |= {field.name: getattr(context, field.name) for field in fields(context)}
    tensors = {k: _tensor_value(v) for k, v in found.items() if isinstance(v, torch.Tensor)}
    numbers = {k: v for k, v in found.items() if type(v) is int and v}
    if context.is_prefill:
        last_rows = [end - 1 for end in context.cu_seqlens_q[1:].tolist()]
    else:
        last_rows = list(range(len(inputs.input_ids)))
    return Inputs(tensors, numbers, last_rows, shapes)


def _tensor_value(tensor: torch.Tensor) -> TensorValue:
    values = tensor.tolist() if tensor.numel() <= MOST_VALUES else None
    return TensorValue(list(tensor.shape), str(tensor.dtype).removeprefix("torch."), values)
