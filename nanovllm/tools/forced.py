"""Forced runs: an engine computes, but accepts the tokens that it is told to.

Two paths can only be compared by their logits if they go through the same tokens: after one honest
near-tie that falls the other way, two greedy completions have nothing to do with each other.
"""

from typing import Any, NamedTuple

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.tools import replaced


class TokenPath(NamedTuple):
    """The ids of a prompt, and the completion to accept after it."""

    ids: list[int]
    num_prompt: int


class Run(NamedTuple):
    """logits: per path, [completion tokens, vocab_size] float32. gained: the engine's counters,
    what this run added to them; "cuts": chunks that left some of a prompt for later."""

    logits: list[torch.Tensor]
    gained: dict[str, Any]


def run_forced(llm: LLM, paths: list[TokenPath], cold: bool = True) -> Run:
    """Add all paths at once and step until they are done. cold: forget all stored prefixes first.
    The engine must have nothing else to do."""
    runner = llm.model_runner
    run, run_model = runner.run, runner.run_model
    seen: dict[tuple[int, int], torch.Tensor] = {}  # (seq_id, length) -> logits of the next token
    latest: list[torch.Tensor] = []
    cuts = 0

    def noted_run_model(inputs: Any) -> torch.Tensor:
        logits = run_model(inputs)
        latest[:] = [logits.float().clone()]  # the sampler may write to them, a graph overwrites
        return logits

    def forced_run(seqs: list[Sequence], is_prefill: bool) -> list[int]:
        nonlocal cuts
        token_ids = run(seqs, is_prefill)
        (logits,) = latest
        for row, seq in enumerate(seqs):
            if seq.completes_in_this_step:
                seen[seq.seq_id, len(seq)] = logits[row]
                token_ids[row] = ids_of[seq.seq_id][len(seq)]
            else:
                cuts += 1
        return token_ids

    if cold:
        llm.scheduler.block_manager.hash_to_block_id.clear()
    before = llm.stats()
    ids_of: dict[int, list[int]] = {}
    for ids, num_prompt in paths:
        params = SamplingParams(temperature=0, max_tokens=len(ids) - num_prompt, ignore_eos=True)
        ids_of[llm.add_request(ids[:num_prompt], params)] = ids
    with replaced(runner, "run_model", noted_run_model), replaced(runner, "run", forced_run):
        while not llm.is_finished():
            llm.step()
    gained = {name: number - before[name] for name, number in llm.stats().items()}
    logits = [
        torch.stack([seen[seq_id, length] for length in range(path.num_prompt, len(path.ids))])
        for seq_id, path in zip(ids_of, paths, strict=True)
    ]
    return Run(logits, gained | {"cuts": cuts})
