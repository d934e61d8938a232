"""Table: the steps of a trace as text that a person can read."""

from collections.abc import Iterable, Iterator
from dataclasses import astuple

from nanovllm.tools.events import Step

MOST_ROWS = 24  # requests shown of a larger step
LINE_WIDTH = 100
COLUMNS = ("", "positions", "scheduled", "cached", "total", "candidate", "block table", "slots")
TENSORS = ("cu_seqlens_q", "cu_seqlens_k", "context_lens", "block_tables")


def ranges(numbers: Iterable[int]) -> str:
    """[17, 5, 6, 7] -> "17 5..7": runs of three and more are shortened."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(
        f"{run[0]}..{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs
    )


def step_lines(step: Step, block_size: int) -> Iterator[str]:
    """A heading, a row for each request of the step, what the model got, and what happened."""
    scheduled, after = step.scheduled, step.after_postprocess
    count, positions = len(scheduled.chosen), sum(r.scheduled for r in scheduled.chosen)
    free = (step.before_schedule.free_blocks, scheduled.free_blocks, after.free_blocks)
    yield (
        f"step {step.number}  {scheduled.phase}: {_count(positions, 'position')} of "
        f"{_count(count, 'request')}; free blocks {free[0]}, {free[1]} while it runs, {free[2]} "
        "after"
    )
    rows = [COLUMNS, *_rows(step, block_size)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()
    if count > MOST_ROWS:
        yield f"  ... and {count - MOST_ROWS} more"
    notes = (*_preempted(step), *_chosen(step), *_pool(step), *_others(step))
    for line in (*_inputs(step), *notes, *_shapes(step)):
        yield f"  {line}"
    yield ""


def _rows(step: Step, block_size: int) -> Iterator[tuple[str, ...]]:
    after = step.after_postprocess
    for before, end, outcome in zip(
        step.scheduled.chosen[:MOST_ROWS],
        after.requests[:MOST_ROWS],
        after.outcomes[:MOST_ROWS],
        strict=True,
    ):
        new = range(before.cached, before.cached + before.scheduled)
        table = before.block_table
        verdict = "accepted" if outcome.accepted else "dropped"
        cached = f"{before.cached} -> {before.cached + before.scheduled}"
        cached += " -> 0" if outcome.finish_reason else ""  # its blocks are free again
        yield (
            before.name,
            ranges(new),
            str(before.scheduled),
            cached,
            f"{before.total} -> {end.total}",
            f"{outcome.candidate} {outcome.text!r} {verdict}",
            f"[{ranges(table)}]",
            ranges(table[p // block_size] * block_size + p % block_size for p in new),
        )


def _inputs(step: Step) -> Iterator[str]:
    """The small tensors that say which row belongs to whom; positions and slots stand above."""
    tensors, numbers = step.inputs.tensors, step.inputs.numbers
    shown = [f"input_ids {tensors['input_ids'].shape}"]
    for name in TENSORS:
        if name in tensors:
            tensor = tensors[name]
            few = tensor.values is not None and tensor.shape[0] <= MOST_ROWS
            shown.append(f"{name} {tensor.values if few else f'of shape {tensor.shape}'}")
    shown += [f"{name} {number}" for name, number in numbers.items()]
    if step.scheduled.phase == "prefill" and len(step.inputs.last_rows) <= MOST_ROWS:
        shown.append(f"logits of rows {step.inputs.last_rows}")
    line = shown[0]
    for part in shown[1:]:
        if len(line) + len(part) > LINE_WIDTH:
            yield line
            line = part
        else:
            line = f"{line}  {part}"
    yield line


def _preempted(step: Step) -> Iterator[str]:
    for name, needed_by, blocks in map(astuple, step.scheduled.preempted):
        why = f"{needed_by} needs a block and none is free; {name} is the newest"
        if needed_by == name:
            why = "it needs a block, none is free, and no newer request can give way"
        yield f"{name} is preempted: {why}"
        yield f"{name} gives back [{ranges(blocks)}], keeps its ids, and waits first in the queue"


def _chosen(step: Step) -> Iterator[str]:
    """What happened to the step's requests besides computing, and why."""
    scheduled, after = step.scheduled, step.after_postprocess
    earlier = {r.name: r for r in (*step.before_schedule.waiting, *step.before_schedule.running)}
    for hit in scheduled.hits:
        yield (
            f"{hit.name} hits [{ranges(hit.blocks)}]: these {hit.positions} positions of its "
            "prefix are stored already"
        )
    for state, end, outcome in zip(scheduled.chosen, after.requests, after.outcomes, strict=True):
        name, left = state.name, state.total - state.cached - state.scheduled
        if scheduled.phase == "decode" and state.block_table != earlier[name].block_table:
            yield f"{name} takes block {state.block_table[-1]}: position {state.cached} opens it"
        if left:
            yield f"{name} is cut to the budget: {left} positions left, so its candidate is dropped"
        if outcome.finish_reason:
            yield (
                f"{name} is finished ({outcome.finish_reason}) and gives back "
                f"[{ranges(state.block_table)}]"
            )
        elif end.num_blocks > len(end.block_table):
            yield (
                f"{name} needs {end.num_blocks} blocks for {end.total} tokens, but has "
                f"{len(end.block_table)}: the last token gets its slot when it is fed"
            )


def _pool(step: Step) -> Iterator[str]:
    """What is special about the blocks after the step."""
    after = step.after_postprocess
    shared = [block_id for block_id, count in after.ref_counts.items() if count > 1]
    if shared:
        counts = [after.ref_counts[block_id] for block_id in shared]
        yield f"shared: [{ranges(shared)}] with reference counts {counts}"
    if after.reusable_blocks:
        few = ranges(after.reusable_blocks[:MOST_ROWS])
        more = " ..." if len(after.reusable_blocks) > MOST_ROWS else ""
        yield f"free, but still in the prefix index: [{few}{more}]"


def _others(step: Step) -> Iterator[str]:
    """Live requests that are not in the step."""
    for status, verb in (("RUNNING", "pausing"), ("WAITING", "waiting")):
        states = [state for state in step.scheduled.others if state.status == status]
        shown = [f"{s.name} {s.cached} of {s.total} cached" for s in states[:MOST_ROWS]]
        if len(states) > MOST_ROWS:
            shown.append(f"and {len(states) - MOST_ROWS} more")
        if states:
            yield f"{verb}: {', '.join(shown)}"


def _shapes(step: Step) -> Iterator[str]:
    width = max((len(name) for name, *_ in step.inputs.shapes), default=0)
    for name, inputs, output in step.inputs.shapes:
        yield f"{name.ljust(width)}  {' '.join(map(str, inputs))} -> {output}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
