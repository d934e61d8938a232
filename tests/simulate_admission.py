"""A big job on a small pool: the real scheduler, no model, and a clock that is a formula.

    PYTHONPATH=. python tests/simulate_admission.py [--prompts 10000]

prints what README.md quotes under "What was tried". test_admission.py runs the same at small sizes.
"""

import argparse
import random
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

from scheduling import make_scheduler, make_sequence

from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import Sequence

EOS, WORD = 1, 2
POSITION_BYTES = 114_688  # of K/V, in Qwen3-0.6B


class Wish(NamedTuple):
    """A request, and what the model would answer: `num_output` tokens, the last of them EOS."""

    num_prompt: int
    num_output: int
    max_tokens: int

    @property
    def num_positions(self) -> int:
        """Positions that must be computed: the last token is never fed back."""
        return self.num_prompt + self.num_output - 1


class Outcome(NamedTuple):
    """What became of a job. `seconds` are simulated."""

    computed: int
    needed: int
    preemptions: int
    steps: int
    seconds: float
    num_output: int

    @property
    def waste(self) -> float:
        """Positions computed per position needed."""
        return self.computed / self.needed

    @property
    def tokens_per_second(self) -> float:
        return self.num_output / self.seconds


def make_job(
    count: int,
    prompt_lengths: tuple[int, int],
    output_lengths: tuple[int, int],
    max_tokens: int | None = None,
    seed: int = 0,
) -> list[Wish]:
    """`count` requests with lengths uniform in the given ranges, which end at `max_tokens` = their
    length, or, if a larger `max_tokens` is given, by EOS before it."""
    rng = random.Random(seed)
    lengths = [(rng.randint(*prompt_lengths), rng.randint(*output_lengths)) for _ in range(count)]
    return [Wish(prompt, output, max_tokens or output) for prompt, output in lengths]


def blocks_wanted(job: Iterable[Wish], block_size: int) -> int:
    """Blocks that hold all of these requests at their full lengths."""
    return sum(-(-wish.num_positions // block_size) for wish in job)


def that_fit(job: Iterable[Wish], num_blocks: int, block_size: int) -> list[Wish]:
    """The first requests of the job, as many as the pool holds at their full lengths."""
    fitting: list[Wish] = []
    for wish in job:
        if blocks_wanted([*fitting, wish], block_size) > num_blocks:
            break
        fitting.append(wish)
    return fitting


def step_seconds(batch: ScheduledBatch) -> float:
    """The clock: a prefill takes 2.5 ms and 2.2 us per position; a decode 1.1 ms, 5 us per request
    and the time to read the K/V of all contexts at 4 TB/s. About what Qwen3-0.6B takes on an H200.
    """
    if batch.is_prefill:
        return 2.5e-3 + 2.2e-6 * sum(seq.num_scheduled_tokens for seq in batch.seqs)
    positions = sum(map(len, batch.seqs))
    return 1.1e-3 + 5e-6 * len(batch.seqs) + positions * POSITION_BYTES / 4e12


def simulate(
    job: list[Wish],
    num_blocks: int,
    block_size: int,
    learns_headroom: bool = True,
    max_num_seqs: int = 512,
    schedule: list[tuple[bool, list[tuple[int, int]]]] | None = None,
) -> Outcome:
    """Run the job to its end. `schedule` gets, per step, its phase and (request, positions)s."""
    scheduler = make_scheduler(
        num_blocks, block_size, eos_token_ids=[EOS], max_num_seqs=max_num_seqs
    )
    scheduler.learns_headroom = learns_headroom
    rng = random.Random(0)
    wishes: dict[Sequence, tuple[int, Wish]] = {}
    for i, wish in enumerate(job):
        prompt = rng.choices(range(WORD, 10_000), k=wish.num_prompt)  # no common prefixes
        seq = make_sequence(scheduler, prompt, max_tokens=wish.max_tokens)
        wishes[seq] = i, wish
        scheduler.add(seq)
    seconds = 0.0
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        seconds += step_seconds(batch)
        if schedule is not None:
            work = [(wishes[seq][0], seq.num_scheduled_tokens) for seq in batch.seqs]
            schedule.append((batch.is_prefill, work))
        tokens = [
            EOS if seq.num_completion_tokens + 1 == wishes[seq][1].num_output else WORD
            for seq in batch.seqs
        ]
        scheduler.postprocess(batch.seqs, tokens, batch.is_prefill)
    for seq, (_, wish) in wishes.items():
        assert seq.num_completion_tokens == wish.num_output
    return Outcome(
        computed=scheduler.num_prefill_tokens + scheduler.num_decode_tokens,
        needed=sum(wish.num_positions for wish in job),
        preemptions=scheduler.num_preemptions,
        steps=scheduler.num_steps,
        seconds=seconds,
        num_output=sum(wish.num_output for wish in job),
    )


def report(name: str, job: list[Wish], num_blocks: int, block_size: int) -> None:
    """Print the job under the plain rule, under the learned one, and a pool-sized part of it."""
    part = that_fit(job, num_blocks, block_size)
    print(f"{name}: {len(job):,} requests on {num_blocks} blocks of {block_size}")
    for label, requests, learns in (
        ("plain rule", job, False),
        ("learned headroom", job, True),
        (f"{len(part)} requests, which fit, alone", part, True),
    ):
        start = perf_counter()
        outcome = simulate(requests, num_blocks, block_size, learns)
        scheduling = (perf_counter() - start) / outcome.steps
        print(
            f"  {label}: {outcome.waste:.3f} positions computed per position needed, "
            f"{outcome.preemptions:,} preemptions, {outcome.steps:,} steps, "
            f"{outcome.tokens_per_second:,.0f} tok/s; {scheduling * 1e6:.0f} us of Python per step",
            flush=True,
        )


def main() -> None:
    """The jobs of README.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count, seed = options.prompts, options.seed
    lengths = (100, 1024)
    full = make_job(count, lengths, lengths, seed=seed)
    early = make_job(count, lengths, (50, 400), max_tokens=1024, seed=seed)
    tenth = blocks_wanted(full[:512], 256) // 10
    report("a tenth of what 512 want", full, tenth, 256)
    report("the same, blocks of 16", full, tenth * 16, 16)
    report("a pool for 60", full[: count // 2], 300, 256)
    report("completions that stop early", early, tenth, 256)
    short = make_job(count, (100, 400), (16, 112), seed=seed)
    report("short completions", short, blocks_wanted(short[:512], 256) // 10, 256)


if __name__ == "__main__":
    main()
