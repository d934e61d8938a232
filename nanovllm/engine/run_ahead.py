"""RunAhead: the engine's loop, one step ahead of the GPU.

    host   schedule, launch 1 | schedule, launch 2 | take in 1 | schedule, launch 3 | take in 2
    GPU                       | step 1 ........... | step 2 .............. | step 3

The step that is scheduled while another runs knows which sequences have a token coming, not which
token: that goes from step to step on the device. A request that turns out to have ended (EOS, stop
string) has then been computed for one position too many, which nobody sees. The tokens are those of
the plain loop, `LLMEngine.step`.
"""

from collections.abc import Callable
from typing import NamedTuple

from nanovllm.engine.model_runner import LaunchedStep, ModelRunner
from nanovllm.engine.scheduler import Progress, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.interrupts import interrupts_held

# (accepted (sequence, token id) pairs, seq_id -> log-probabilities) -> None
OnTokens = Callable[[list[tuple[Sequence, int]], dict[int, dict[int, float]]], None]


class InFlight(NamedTuple):
    """A launched step and what the scheduler will need when its tokens come."""

    launched: LaunchedStep
    progress: list[Progress]
    num_tokens: int  # positions; negative in decode


class RunAhead:
    """At most one step is in flight between calls; `drain` brings it in."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, on_tokens: OnTokens) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.on_tokens = on_tokens
        self.in_flight: InFlight | None = None

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Launch the next step and take in the one before it. Returns what `LLMEngine.step` does,
        of the step taken in; ([], 0) if there was none."""
        before = self.in_flight
        if before is not None and not self.scheduler.can_run_ahead():
            return self.drain()
        with interrupts_held():  # from schedule to advance; none of it waits for the GPU
            self.in_flight = None if self.scheduler.is_finished() else self._launch(before)
        return ([], 0) if before is None else self._take_in(before)

    def drain(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Take in the step in flight, if there is one."""
        before, self.in_flight = self.in_flight, None
        return ([], 0) if before is None else self._take_in(before)

    def _launch(self, before: InFlight | None) -> InFlight:
        seqs, is_prefill = self.scheduler.schedule()
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        try:
            launched = self.runner.call("launch", seqs, is_prefill)
        except BaseException:
            # The sequences of the step before have pending tokens, which this takes from them.
            self.scheduler.rollback(self._merged(seqs, before))
            self.in_flight = None
            raise
        progress = self.scheduler.advance(seqs, is_prefill)
        return InFlight(launched, progress, num_tokens if is_prefill else -num_tokens)

    def _take_in(self, step: InFlight) -> tuple[list[tuple[int, list[int]]], int]:
        try:
            token_ids = self.runner.call("collect", step.launched)
        except BaseException:  # Ctrl-C while waiting, too
            ahead = [row.seq for row in self.in_flight.progress] if self.in_flight else []
            self.scheduler.rollback(self._merged(ahead, step))
            self.in_flight = None
            raise
        with interrupts_held():
            accepted = self.scheduler.commit(step.progress, token_ids)
            self.on_tokens(accepted, step.launched.logprobs)
        finished = [(s.seq_id, s.completion_token_ids) for s, _ in accepted if s.is_finished]
        return finished, step.num_tokens

    @staticmethod
    def _merged(seqs: list[Sequence], before: InFlight | None) -> list[Sequence]:
        """The sequences of two steps, each once, in order."""
        earlier = [row.seq for row in before.progress] if before is not None else []
        return list({seq.seq_id: seq for seq in (*earlier, *seqs)}.values())
