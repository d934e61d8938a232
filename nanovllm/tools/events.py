"""What a trace consists of: the four events of each step, plain data that json can write."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class RequestState:
    """One request at one moment. `name` is A, B, ... in the order of arrival."""

    name: str
    status: str
    total: int
    cached: int
    scheduled: int
    num_blocks: int  # that `total` positions need
    block_table: list[int]


@dataclass(frozen=True, slots=True)
class BeforeSchedule:
    """The queues, left to right, before the scheduler looks at them."""

    waiting: list[RequestState]
    running: list[RequestState]
    free_blocks: int


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks that hold the prefix of `name` already: these positions are not computed."""

    name: str
    blocks: list[int]
    positions: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """`name` gave `blocks` back because `needed_by` needed one and none was free."""

    name: str
    needed_by: str
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The scheduler's choice. `chosen` are the step's rows; total, cached and scheduled are from
    before the step runs, `block_table` is what it runs with."""

    phase: str  # "prefill" or "decode"
    chosen: list[RequestState]
    others: list[RequestState]  # live, but not in this step
    hits: list[Hit]
    preempted: list[Preemption]
    free_blocks: int
    reusable_blocks: list[int]  # free, but still hit by a prompt with the same prefix


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor as json can write it."""

    shape: list[int]
    dtype: str
    values: list[Any] | None  # nested; None: too large to keep


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model is called with, by the names of StepInputs and Context. `last_rows`: the rows
    of the step whose logits are computed. `shapes`: (module, shapes of its inputs, of its output)
    in the order of execution, layer 0 only; empty unless asked for, or when a CUDA graph ran."""

    tensors: dict[str, TensorValue]
    numbers: dict[str, int]
    last_rows: list[int]
    shapes: list[tuple[str, list[list[int]], list[int]]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The token sampled for `name`; not accepted: dropped, as the prefill is not complete."""

    name: str
    candidate: int
    text: str
    accepted: bool
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class AfterPostprocess:
    """The step's requests after its tokens were accepted, and the pool."""

    requests: list[RequestState]
    outcomes: list[Outcome]
    ref_counts: dict[int, int]  # of the blocks in use
    free_blocks: int
    reusable_blocks: list[int]


class Step(NamedTuple):
    """One step, in the four events that `--json` writes."""

    number: int  # from 1
    before_schedule: BeforeSchedule
    scheduled: Scheduled
    inputs: Inputs
    after_postprocess: AfterPostprocess

    def events(self) -> Iterator[dict[str, Any]]:
        """As flat objects that json can write."""
        for name, event in zip(self._fields[1:], self[1:], strict=True):
            yield {"event": name, "step": self.number, **asdict(event)}


def letters(index: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA, ..."""
    text = ""
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        text = chr(ord("A") + digit) + text
    return text
