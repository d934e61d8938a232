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
from nanovllm.utils.interrupts import collector_held, interrupts_held

# (finished (seq_id, completion token ids) pairs, positions computed: negative in decode)
StepResult = tuple[list[tuple[int, list[int]]], int]
# (accepted (sequence, token id) pairs, seq_id -> log-probabilities) -> None
OnTokens = Callable[[list[tuple[Sequence, int]], dict[int, dict[int, float]]], None]


class InFlight(NamedTuple):
    """A launched step and what the scheduler will need when its tokens come."""

    launched: LaunchedStep
    progress: list[Progress]
    num_tokens: int  # positions; negative in decode


class RunAhead:
    """At most one step is in flight between calls; `drain` brings it in."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.in_flight: InFlight | None = None

    def is_idle(self) -> bool:
        """Whether nothing is left to run, nor to be taken in."""
        return self.in_flight is None and self.scheduler.is_finished()

    def step(self, on_tokens: OnTokens) -> StepResult:
        """Launch the next step and take in the one before it. Returns what `LLMEngine.step` does,
        of the step taken in; ([], 0) if there was none."""
        may_launch = self.in_flight is None or self.scheduler.can_run_ahead()
        return self._turn(on_tokens, may_launch and not self.scheduler.is_finished())

    def drain(self, on_tokens: OnTokens) -> StepResult:
        """Take in the step in flight, if there is one."""
        return self._turn(on_tokens, launches=False)

    def _turn(self, on_tokens: OnTokens, launches: bool) -> StepResult:
        before = self.in_flight
        try:
            with collector_held():
                with interrupts_held():  # from schedule to advance; none of it waits for the GPU
                    self.in_flight = self._launch() if launches else None
                return ([], 0) if before is None else self._take_in(before, on_tokens)
        except BaseException:  # a step failed; or Ctrl-C, held back or while waiting
            with interrupts_held():
                self._undo(before, self.in_flight)
            raise

    def _launch(self) -> InFlight:
        seqs, is_prefill = self.scheduler.schedule()
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        try:
            launched = self.runner.call("launch", seqs, is_prefill)
        except BaseException:
            self.scheduler.rollback(seqs)
            raise
        progress = self.scheduler.advance(seqs, is_prefill)
        return InFlight(launched, progress, num_tokens if is_prefill else -num_tokens)

    def _take_in(self, step: InFlight, on_tokens: OnTokens) -> StepResult:
        token_ids = self.runner.call("collect", step.launched)
        with interrupts_held():
            accepted = self.scheduler.commit(step.progress, token_ids)
            on_tokens(accepted, step.launched.logprobs)
        finished = [(s.seq_id, s.completion_token_ids) for s, _ in accepted if s.is_finished]
        return finished, step.num_tokens

    def _undo(self, *steps: InFlight | None) -> None:
        """Let the sequences of these steps wait again, each once, in order: what they computed and
        was not taken in is computed anew."""
        rows = [row for step in steps if step is not None for row in step.progress]
        self.scheduler.rollback(list({row.seq.seq_id: row.seq for row in rows}.values()))
        self.in_flight = None
