"""Watching a running engine from inside the model, and comparing logits. CPU, and eager GPU: a
replayed CUDA graph runs no Python, so no hook fires."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from checkpoints import logit_errors
from invariants import check_invariants, check_step

from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import LaunchedStep
from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import PENDING, Sequence
from nanovllm.utils.context import Context, get_context

GREEDY = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One `step()`: what the model was fed and gave, and what was returned."""

    seqs: list[Sequence]
    last_positions: list[int]  # of each sequence: the one whose logits are sampled from
    input_ids: list[int]
    positions: list[int]
    context: Context  # as an attention layer read it
    hidden: torch.Tensor  # [N, hidden]
    logits: torch.Tensor  # [N, vocab]
    last_rows: list[int]  # rows that go on from the last layer's attention, found by comparing
    finished: list[tuple[int, list[int]]]
    num_tokens: int
    num_free_blocks: int


class Watch:
    """Records every step of an engine, from now on."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.steps: list[Step] = []
        self._seen: dict[str, Any] = {}
        self._attended: list[torch.Tensor] = []
        self._run = llm.model_runner.run
        llm.model_runner.run = self._on_run
        model = llm.model_runner.model
        model.register_forward_hook(self._on_model)
        model.lm_head.register_forward_hook(self._on_lm_head)
        first, last = model.model.layers[0].self_attn, model.model.layers[-1].self_attn
        first.attn.register_forward_pre_hook(lambda *_: self._seen.update(context=get_context()))
        last.attn.register_forward_hook(lambda *seen: self._attended.append(seen[-1].flatten(1)))
        last.o_proj.register_forward_pre_hook(self._on_o_proj)

    def _on_run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        check_step(self.llm.scheduler, ScheduledBatch(seqs, is_prefill))
        ends = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs]
        self._seen.update(seqs=list(seqs), last_positions=[end - 1 for end in ends])
        return self._run(seqs, is_prefill)

    def _on_model(self, module: Any, args: Any, hidden: torch.Tensor) -> None:
        input_ids, positions = args
        self._seen.update(
            input_ids=input_ids.tolist(), positions=positions.tolist(), hidden=hidden.clone()
        )

    def _on_o_proj(self, module: Any, args: Any) -> None:
        nearest = torch.cdist(args[0], self._attended.pop()).argmin(dim=1).tolist()
        self._seen.update(last_rows=nearest)

    def _on_lm_head(self, lm_head: Any, args: Any, logits: torch.Tensor) -> None:
        self._seen.update(logits=logits.clone())

    def step(self) -> Step:
        """Run one step of the engine, check the scheduler's invariants, return the record."""
        self._seen = {}
        finished, num_tokens = self.llm.step()
        check_invariants(self.llm.scheduler)
        free = self.llm.scheduler.block_manager.free_block_ids
        step = Step(
            **self._seen, finished=finished, num_tokens=num_tokens, num_free_blocks=len(free)
        )
        self.steps.append(step)
        return step

    def run(self) -> list[Step]:
        """Run until the engine is finished; the records of these steps."""
        first = len(self.steps)
        while not self.llm.is_finished():
            self.step()
        return self.steps[first:]

    def logits_of(self, seq: Sequence) -> dict[int, torch.Tensor]:
        """Position -> the logits [vocab] at it, wherever they were computed for `seq`."""
        return {
            position: step.logits[row]
            for step in self.steps
            for row, (other, position) in enumerate(
                zip(step.seqs, step.last_positions, strict=True)
            )
            if other is seq
        }


def add(llm: LLM, token_ids: list[int], **params: Any) -> Sequence:
    """`add_request`, greedy and without EOS unless `params` say otherwise; its Sequence."""
    llm.add_request(token_ids, SamplingParams(**{**GREEDY, **params}))
    return llm.scheduler.waiting[-1]


def progress(seq: Sequence) -> str:
    """total/cached, as worked examples write it."""
    return f"{seq.num_tokens}/{seq.num_cached_tokens}"


def script(llm: LLM, emit: Callable[[Sequence], int]) -> None:
    """Replace the model by a fake that gives `emit(seq)` for each sequence of a step. It works a
    step ahead, too: a pending token is filled in before `emit` looks, as on a device."""
    latest: dict[int, int] = {}

    def launch(seqs: list[Sequence], is_prefill: bool) -> LaunchedStep:
        token_ids = []
        for seq in seqs:
            pending = seq.last_token == PENDING
            if pending:
                seq.token_ids[-1] = latest[seq.seq_id]
            token_ids.append(emit(seq))
            if pending:
                seq.token_ids[-1] = PENDING
        latest.clear()
        latest.update(zip((seq.seq_id for seq in seqs), token_ids, strict=True))
        return LaunchedStep(torch.tensor(token_ids, dtype=torch.int32), None, {})

    llm.model_runner.launch = launch


def assert_logits_agree(
    what: str,
    actual: dict[int, torch.Tensor],
    reference: dict[int, torch.Tensor],
    tolerance: float = 1e-4,
) -> None:
    """At every position of `reference`: max absolute error and relative L2 within `tolerance`, and
    the same top-1 token. All three are reported."""
    assert reference, f"{what}: nothing to compare"
    missing = reference.keys() - actual.keys()
    assert not missing, f"{what}: no logits at positions {sorted(missing)}"
    errors = logit_errors(
        torch.stack([actual[position] for position in reference]),
        torch.stack([reference[position] for position in reference]),
    )
    report = (
        f"{what}: max abs error {errors.max_abs:.2e}, relative L2 {errors.relative_l2:.2e}, top-1 "
        f"agreement {errors.top1_agreement:.4f} over {len(reference)} positions, where {tolerance} "
        "is tolerated"
    )
    assert max(errors.max_abs, errors.relative_l2) <= tolerance, report
    assert errors.top1_agreement == 1.0, report
