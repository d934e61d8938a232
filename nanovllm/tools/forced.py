"""Forced runs: an engine computes, but accepts the tokens that it is told to.

Two paths can only be compared by their logits if they go through the same tokens: after one honest
near-tie that falls the other way, two greedy completions have nothing to do with each other.
"""

from typing import Any, NamedTuple

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.inputs import StepInputs
from nanovllm.engine.sequence import Sequence
from nanovllm.tools import replaced


class TokenPath(NamedTuple):
    """The ids of a prompt, and the completion to accept after it."""

    ids: list[int]
    num_prompt: int


class Run(NamedTuple):
    """logits: per path, [completion tokens, vocab_size] float32. shortfall: by how much at most a
    sampled token's logit was below the best. gained: the engine's counters, what this run added to
    them; "cuts": chunks that left some of a prompt for later; "prefill_replays": of its graphs."""

    logits: list[torch.Tensor]
    shortfall: float
    gained: dict[str, Any]


def run_forced(llm: LLM, paths: list[TokenPath], cold: bool = True) -> Run:
    """Add all paths at once and step until they are done. cold: forget all stored prefixes first.
    The engine must have nothing else to do. With several ranks it must have no graphs: their
    logits are computed again here, by rank 0 alone, and the others would not take part."""
    runner = llm.model_runner
    run, run_model, replay = runner.run, runner.run_model, runner._replay
    seen: dict[tuple[int, int], torch.Tensor] = {}  # (seq_id, length) -> logits of the next token
    latest: list[torch.Tensor] = []
    counts = {"cuts": 0, "prefill_replays": 0}
    shortfall = 0.0

    def noted_run_model(inputs: StepInputs) -> torch.Tensor:
        logits = run_model(inputs)
        latest[:] = [logits.float().clone()]  # the sampler may write to them
        return logits

    def noted_replay(seqs: list[Sequence], is_prefill: bool) -> torch.Tensor | None:
        hidden = replay(seqs, is_prefill)
        if hidden is not None:
            counts["prefill_replays"] += is_prefill
            latest[:] = [runner.model.compute_logits(hidden).float().clone()]
        return hidden

    def forced_run(seqs: list[Sequence], is_prefill: bool) -> list[int]:
        nonlocal shortfall
        token_ids = run(seqs, is_prefill)
        (logits,) = latest
        for row, seq in enumerate(seqs):
            if seq.num_cached_tokens + seq.num_scheduled_tokens == seq.num_tokens:
                best, sampled = logits[row].max(), logits[row, token_ids[row]]
                shortfall = max(shortfall, float(best - sampled))
                seen[seq.seq_id, len(seq)] = logits[row]
                token_ids[row] = ids_of[seq.seq_id][len(seq)]
            else:
                counts["cuts"] += 1
        return token_ids

    if cold:
        llm.scheduler.block_manager.hash_to_block_id.clear()
    before = llm.stats()
    ids_of: dict[int, list[int]] = {}
    for ids, num_prompt in paths:
        params = SamplingParams(temperature=0, max_tokens=len(ids) - num_prompt, ignore_eos=True)
        ids_of[llm.add_request(ids[:num_prompt], params)] = ids
    with (
        replaced(runner, "run_model", noted_run_model),
        replaced(runner, "_replay", noted_replay),
        replaced(runner, "run", forced_run),
    ):
        while not llm.is_finished():
            llm.step()  # `generate` may run ahead, and then nobody can tell it what to accept
    gained = {name: number - before[name] for name, number in llm.stats().items()}
    logits = [
        torch.stack([seen[seq_id, length] for length in range(path.num_prompt, len(path.ids))])
        for seq_id, path in zip(ids_of, paths, strict=True)
    ]
    return Run(logits, shortfall, gained | counts)
