"""Sequence: the record of one request. It holds state; the scheduler and block manager move it."""

from enum import Enum, auto
from itertools import count
from random import Random

from nanovllm.sampling_params import SamplingParams

# Stands for a token that a launched step will deliver: see Scheduler.advance. Never left between
# the steps of the plain loop.
PENDING = -1

_fresh_seeds = Random()  # its own state: the caller's random numbers are not disturbed


class SequenceStatus(Enum):
    """Where a request is in its life.

        WAITING --(last prompt position scheduled)--> RUNNING --(stop rule, abort)--> FINISHED
           ^ |                                          |                               ^
           | +------------------------------------------|------------(abort)------------+
           +------------(preempted, step failed)--------+

    Only four functions move it: `Scheduler.schedule` to RUNNING, `Scheduler.preempt` back to
    WAITING, `Scheduler.finish` and `Scheduler.abort` to FINISHED.
    """

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One request: its token ids and how far their K/V has been computed.

    The positions of a request, left to right, between `schedule` and `postprocess`:

        |<- num_cached_tokens ->|<- num_scheduled_tokens ->|<- later chunks ->|
        |<-------------------------- num_tokens ----------------------------->|

    K/V of the cached positions is in the pool, the scheduled ones are computed in this step.
    In steady decode `num_tokens == num_cached_tokens + 1`: the token just accepted has no K/V
    until it has been fed through the model.
    """

    _ids = count()

    def __init__(
        self,
        token_ids: list[int],
        sampling_params: SamplingParams | None = None,
        block_size: int = 256,
    ) -> None:
        """token_ids: the prompt, not empty (checked by the engine); copied.
        block_size: that of the engine which will run it; kept per sequence, so that engines of
        different block sizes live in one process."""
        sampling_params = sampling_params or SamplingParams()
        self.seq_id = next(Sequence._ids)
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None  # "stop", "length" or "abort", once FINISHED
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.block_table: list[int] = []
        self.block_size = block_size
        self.sampling_params = sampling_params
        # The seed of this request's noise; requests that name none must not share one. As int64
        # holds its 64 bits.
        seed = sampling_params.seed
        seed = _fresh_seeds.getrandbits(64) if seed is None else seed
        self.seed = (seed + 2**63) % 2**64 - 2**63
        self.temperature = sampling_params.temperature
        self.max_tokens = sampling_params.max_tokens
        self.ignore_eos = sampling_params.ignore_eos

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, tokens={self.num_tokens}, "
            f"cached={self.num_cached_tokens}, scheduled={self.num_scheduled_tokens}, "
            f"block_table={self.block_table})"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt plus completion tokens, pending ones included."""
        return len(self.token_ids)

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def scheduled_token_ids(self) -> list[int]:
        """The ids at the scheduled positions."""
        start = self.num_cached_tokens
        return self.token_ids[start : start + self.num_scheduled_tokens]

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        """The accepted ones: without what is pending, which are two at most."""
        end = self.num_tokens - self.token_ids[-2:].count(PENDING)
        return self.token_ids[self.num_prompt_tokens : end]

    @property
    def num_blocks(self) -> int:
        """Logical blocks that `num_tokens` positions need. Just after the token that opens a new
        block was accepted it is one more than `len(block_table)`: see `BlockManager.can_append`.
        """
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        """Tokens in the last logical block, 1 to block_size."""
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        """The token ids of logical block i, which must exist."""
        assert 0 <= i < self.num_blocks
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        """Accept one completion token. Its K/V is computed by the next step."""
        self.token_ids.append(token_id)
