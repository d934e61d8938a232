"""Steady decode under torch.profiler: which kernels a step runs, and how long the GPU idles in it.

One result, of a batch of requests that all decode in every step:

    batch, context         requests, and about how long each is on average (tokens)
    steps                  how many steps the numbers of the profile are of
    step_ms                a step by the clock, before any profiler has run
    profiled_step_ms       a step in the profile: from the end of one step's last work on the GPU to
                           the end of the next one's
    kernels                per kernel (and kind of copy): calls and us a step, share of their sum
    kernel_ms              that sum, a step; what overlaps counts twice
    busy_ms                time in which at least one of them ran, a step
    idle_share             1 - busy_ms / profiled_step_ms
    idle_share_estimate    1 - busy_ms / step_ms

The profiler slows the launch of CUDA graphs, so `idle_share` is rather too high. It can stretch the
kernels as well, so the estimate, of one run's busy time and another's step, is rather too low, and
below 0 if the GPU hardly idles. A kernel that waits for its predecessor (programmatic dependent
launch) or for another GPU (all-reduce) counts as busy, and so does one that fills a corner of the
GPU. Seen is one GPU, rank 0's.

Without a GPU the rows are torch's operators, each with its own time, the time in others that it
calls left out, and a profiled step is one by the clock. What "idle" would mean is then undefined:
`busy_ms` and the two shares are None.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import mean
from time import perf_counter
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams

SETTLE_STEPS = 20  # run before those that count
STEPS = 20
LEAD_STEPS = 4  # recorded in front of them: the profiler's own start disturbs the first
# The last thing that a step does on the GPU, and its only copy in that direction: the sampled ids.
END_OF_STEP = "Memcpy DtoH"
# Waits, which the profiler may list beside the kernels, though nothing runs in them.
WAITS = {"Context Sync", "Event Sync", "Stream Sync", "Stream Wait Event"}
NAME_WIDTH, MOST_ROWS = 60, 24  # of the printed table


class Span(NamedTuple):
    """Something that ran on the GPU; times in us."""

    name: str
    start: float
    end: float


class Row(NamedTuple):
    """A kernel, or without a GPU an operator; calls and us are those of a step."""

    name: str
    calls: float
    us: float
    share: float


# --- from events to numbers -----------------------------------------------------------------------


def gpu_spans(events: Iterable[Any]) -> list[Span]:
    """What of torch.profiler's FunctionEvents ran on the GPU."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and event.name not in WAITS
    ]


def whole_steps(spans: list[Span], num_steps: int) -> tuple[list[Span], float]:
    """The spans of the last `num_steps` whole steps, and how long these steps took, in us. A step
    begins where the one before ends. Raises RuntimeError if the ends of steps are not what
    `num_steps + LEAD_STEPS` recorded steps have."""
    ends = sorted(span.end for span in spans if span.name.startswith(END_OF_STEP))
    # One more: launched, and not yet taken in. One less: the first end may have come too early.
    if not num_steps < len(ends) <= num_steps + LEAD_STEPS + 1:
        raise RuntimeError(
            f"{num_steps + LEAD_STEPS} steps were recorded with {len(ends)} copies to the host, "
            "instead of one each: the profile cannot be cut into steps"
        )
    begin, end = ends[-num_steps - 1], ends[-1]
    return [span for span in spans if begin < span.end <= end], end - begin


def covered(spans: Iterable[Span]) -> float:
    """How long at least one of the spans ran, in us."""
    total, reached = 0.0, float("-inf")
    for _, start, end in sorted(spans, key=lambda span: span.start):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def rows_by_name(times: Iterable[tuple[str, float]], num_steps: int) -> list[Row]:
    """(name, us) of every call in `num_steps` steps -> the table, the longest first."""
    calls: dict[str, list[float]] = defaultdict(list)
    for name, us in times:
        calls[name].append(us)
    total = sum(map(sum, calls.values()))
    rows = [
        Row(short_name(name), len(each) / num_steps, sum(each) / num_steps, sum(each) / total)
        for name, each in calls.items()
    ]
    return sorted(rows, key=lambda row: -row.us)


def short_name(name: str) -> str:
    """A kernel's name without what says nothing, and cut. Names that differ only behind the cut
    stay rows of their own."""
    for noise in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(noise, "")
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."


def gpu_numbers(spans: list[Span], num_steps: int, step_ms: float) -> dict[str, Any]:
    """What the profile of a GPU tells of its last `num_steps` whole steps, as listed above."""
    spans, window_us = whole_steps(spans, num_steps)
    busy_us = covered(spans)
    rows = rows_by_name(((span.name, span.end - span.start) for span in spans), num_steps)
    return {
        "profiled_step_ms": window_us / num_steps / 1e3,
        "kernel_ms": sum(row.us for row in rows) / 1e3,
        "busy_ms": busy_us / num_steps / 1e3,
        "idle_share": 1 - busy_us / window_us,
        "idle_share_estimate": 1 - busy_us / num_steps / 1e3 / step_ms,
        "kernels": [row._asdict() for row in rows],
    }


def cpu_numbers(events: Iterable[Any], num_steps: int, step_ms: float) -> dict[str, Any]:
    """The same without a GPU, of FunctionEvents; step_ms: of a step in the profile."""
    rows = rows_by_name(((event.name, event.self_cpu_time_total) for event in events), num_steps)
    return {
        "profiled_step_ms": step_ms,
        "kernel_ms": sum(row.us for row in rows) / 1e3,
        "busy_ms": None,
        "idle_share": None,
        "idle_share_estimate": None,
        "kernels": [row._asdict() for row in rows],
    }


# --- the runs -------------------------------------------------------------------------------------


def profile_decode(
    llm: LLM, batches: list[list[list[int]]], temperature: float
) -> list[dict[str, Any]]:
    """One result per batch, a list of prompts' token ids. The engine must be idle, and is again.

    Raises ValueError if the engine's limits or its pool keep a batch from decoding together.
    """
    # torch's own precaution with CUDA graphs: a profiler that detaches from the GPU after its
    # first run can crash in the second.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    # It stays attached then, which costs time: all that is timed without it comes first.
    timed = [steady_step_ms(llm, prompts, temperature, STEPS) for prompts in batches]
    on_gpu = llm.model_runner.device.type == "cuda"
    results = []
    for prompts, step_ms in zip(batches, timed, strict=True):
        profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        num_steps = STEPS + LEAD_STEPS if on_gpu else STEPS
        profiled_ms = steady_step_ms(llm, prompts, temperature, num_steps, profiler)
        if on_gpu:
            numbers = gpu_numbers(gpu_spans(profiler.events()), STEPS, step_ms)
        else:
            numbers = cpu_numbers(profiler.events(), STEPS, profiled_ms)
        context = round(mean(map(len, prompts)) + SETTLE_STEPS + STEPS / 2)
        result = {"batch": len(prompts), "context": context, "steps": STEPS, "step_ms": step_ms}
        results.append(result | numbers)
    return results


def steady_step_ms(
    llm: LLM,
    prompts: list[list[int]],
    temperature: float,
    num_steps: int,
    recorder: AbstractContextManager[Any] | None = None,
) -> float:
    """Bring all prompts into decode, run `num_steps` steps inside `recorder`, and let all
    finish. Returns the ms that one of these steps took."""
    # The first is from prefill; the last is left for later, so that none ends in these steps.
    max_tokens = 1 + SETTLE_STEPS + num_steps + 1
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    added: list[int] = []
    try:
        for prompt in prompts:
            added.append(llm.add_request(prompt, params))
    except ValueError:
        for request_id in added:
            llm.abort(request_id)
        raise
    while llm.scheduler.waiting:
        llm._loop_step()
    for _ in range(SETTLE_STEPS):
        llm._loop_step()
    with recorder or nullcontext():
        start = perf_counter()
        decoded = [-llm._loop_step()[1] for _ in range(num_steps)]
        seconds = perf_counter() - start
    while not llm.is_finished():
        llm.step()  # which also reports their ends, so that none is left to tell
    if set(decoded) != {len(prompts)}:
        raise ValueError(
            f"{len(prompts)} requests of up to {max(map(len, prompts))} + {max_tokens} tokens do "
            f"not decode together (one step had {min(decoded)} of them): take fewer or shorter "
            "ones, or raise max_num_seqs, max_model_len or the KV pool"
        )
    return 1e3 * seconds / num_steps


# --- for people -----------------------------------------------------------------------------------


def profile_lines(result: dict[str, Any]) -> Iterator[str]:
    """A result of `profile_decode` as text."""
    has_gpu = result["busy_ms"] is not None
    yield f"batch {result['batch']}, context {result['context']}, {result['steps']} steps of decode"
    heading = "kernel" if has_gpu else "operator"
    yield f"  {heading:{NAME_WIDTH}}  calls/step    us/step   share"
    rows = result["kernels"]
    for row in rows[:MOST_ROWS]:
        yield (
            f"  {row['name']:{NAME_WIDTH}}  {row['calls']:10.1f} {row['us']:10.1f} "
            f"{row['share']:7.1%}"
        )
    if len(rows) > MOST_ROWS:
        rest = rows[MOST_ROWS:]
        calls, us, share = (sum(row[key] for row in rest) for key in ("calls", "us", "share"))
        yield f"  {f'{len(rest)} more':{NAME_WIDTH}}  {calls:10.1f} {us:10.1f} {share:7.1%}"
    yield f"  step without the profiler        {result['step_ms']:8.3f} ms"
    yield f"  step in the profile              {result['profiled_step_ms']:8.3f} ms"
    yield f"  sum over the table               {result['kernel_ms']:8.3f} ms a step"
    if has_gpu:
        yield f"  GPU busy                         {result['busy_ms']:8.3f} ms a step"
        yield f"  GPU idle in the profile          {result['idle_share']:8.1%}"
        yield f"  GPU idle without it, estimated   {result['idle_share_estimate']:8.1%}"
