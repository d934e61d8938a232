"""Measure an engine: prefill and decode speed apart, achieved memory bandwidth, start-up, memory.

    python bench.py                                  the default load, see below
    python bench.py --dummy qwen3-8b                 random weights in the real shape of Qwen3-8B
    python bench.py --model DIR --num-seqs 1 --min-input 128 --max-input 128 \\
        --min-output 512 --max-output 512            latency: one request of exactly 128 in, 512 out
    python bench.py --profile                        where a decode step's time goes, by kernel

Default load: with a GPU `--dummy qwen3-0.6b` and the classic workload (256 requests, prompt and
output lengths uniform in 100-1024, ids uniform in 0-10000, temperature 0.6, seed 0: 142,827 prompt
and 133,966 output tokens). Without a GPU that would take hours: there it is the bundled tiny model,
and a small workload for any model. Every request runs to its full output length (`ignore_eos`).

What is timed is `LLM.generate`, from the first check of a prompt to the last completion's text.
One short run before it, at most 8 output tokens a request, warms up kernels and allocator. Every
repeat has the same lengths but fresh random ids: else the prefix cache would have the answers. The
last line is one JSON object with all that was measured: medians, and each repeat.

`--profile` instead takes the load's prompts, all --num-seqs of them and then the first alone, into
steady decode, and prints for both how a step's time divides over the kernels and for which share of
it the GPU idles; output lengths and repeats play no part. nanovllm/tools/decode_profile.py says
what each number means, and its limits.
"""

import argparse
import importlib
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.tools import BUNDLED_MODEL
from nanovllm.tools.decode_profile import profile_decode, profile_lines
from nanovllm.tools.dummy_model import DUMMY_SHAPES, dummy_config, write_dummy

# Flags and their defaults: the workload's (classic, or small without a GPU), and the engine's.
LENGTHS = dict(num_seqs=256, min_input=100, max_input=1024, min_output=100, max_output=1024)
SMALL_LENGTHS = dict(num_seqs=8, min_input=16, max_input=64, min_output=16, max_output=64)
WORKLOAD = {**LENGTHS, "max_token_id": 10000, "temperature": 0.6, "seed": 0}
SETTINGS = {field.name: field.default for field in fields(Config) if field.name != "model"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the default load filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="folder in Hugging Face format")
    source.add_argument("--dummy", choices=DUMMY_SHAPES, help="random weights of this shape")
    parser.add_argument("--keep", metavar="DIR", help="keep the dummy model here, to use it again")
    parser.add_argument("--profile", action="store_true", help="profile decode steps, see above")
    for name, default in {**WORKLOAD, "repeats": 3, **SETTINGS}.items():
        flags = ["--" + name.replace("_", "-")] + ["--tp"] * (name == "tensor_parallel_size")
        kind = {"type": int if default is None else type(default), "metavar": "X"}
        if default is False:
            kind = {"action": "store_true"}
        text = "default: %(default)s"
        if name in SMALL_LENGTHS:
            text += f", of the small workload {SMALL_LENGTHS[name]}"
        parser.add_argument(*flags, default=default, help=text, **kind)
    args = parser.parse_args(argv)
    if args.keep and not args.dummy:
        parser.error("--keep is for the model that --dummy makes")
    is_cuda = torch.cuda.is_available() and args.device != "cpu"
    if not is_cuda:
        parser.set_defaults(**SMALL_LENGTHS)
        args = parser.parse_args(argv)
    if args.model is None and args.dummy is None:
        if is_cuda:
            args.dummy = "qwen3-0.6b"
        else:
            print("no GPU and no --model or --dummy: the bundled model and a small workload")
            args.model = str(BUNDLED_MODEL)
    if not (1 <= args.min_input <= args.max_input and 1 <= args.min_output <= args.max_output):
        parser.error(
            f"give lengths with 1 <= minimum <= maximum: input {args.min_input} to "
            f"{args.max_input}, output {args.min_output} to {args.max_output}"
        )
    if min(args.num_seqs, args.repeats, args.max_token_id) < 1:
        parser.error("--num-seqs, --repeats and --max-token-id must be at least 1")
    return args


# --- workload and timing --------------------------------------------------------------------------


@contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[str]:
    """The folder to load from. A temporary one is gone after the block, on error as well."""
    if args.model:
        yield args.model
        return
    with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as temporary:
        folder = args.keep or temporary
        write_dummy(Path(folder), dummy_config(args.dummy), tokenizer=BUNDLED_MODEL)
        yield folder


class Workload(NamedTuple):
    prompts: list[list[int]]
    output_lens: list[int]


def draw_workload(args: argparse.Namespace, max_id: int, repeat: int = 0) -> Workload:
    """Repeat 0 is the classic draw in the classic order, so that a seed is one load everywhere;
    the others have its lengths and ids of their own."""
    rng = Random(args.seed)
    prompts = [
        [rng.randint(0, max_id) for _ in range(rng.randint(args.min_input, args.max_input))]
        for _ in range(args.num_seqs)
    ]
    output_lens = [rng.randint(args.min_output, args.max_output) for _ in range(args.num_seqs)]
    if repeat:
        rng = Random(args.seed + repeat)
        prompts = [[rng.randint(0, max_id) for _ in prompt] for prompt in prompts]
    return Workload(prompts, output_lens)


class TimedLLM(LLM):
    """An LLM that notes (start, end, num_tokens) of each step. A step counts from the end of the
    one before, and ends when its token ids are on the host."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.steps: list[tuple[float, float, int]] = []
        self.begin: float | None = None
        super().__init__(model, **settings)

    def _loop_step(self) -> tuple[list[tuple[int, list[int]]], int]:
        if self.begin is None:
            self.begin = perf_counter()
        finished, num_tokens = super()._loop_step()
        if num_tokens:  # none, if the loop has only launched a step and had none to wait for
            self.steps.append((self.begin, perf_counter(), num_tokens))
            self.begin = self.steps[-1][1]
        return finished, num_tokens


def decode_bytes(llm: LLM, load: Workload, num_steps: int) -> int:
    """Bytes that all decode steps together have to read from the memory of one GPU (rank 0's).

    A step reads every weight once, except the embedding of an untied model, of which it takes one
    row per request; a tied one is the LM head as well, and read whole. And a request's decode
    steps read the K/V of its context: P + 1, ..., P + O - 1 positions for P prompt and O output
    tokens (the first of them comes from prefill). Activations and writes are small beside these.
    """
    model, pool = llm.model_runner.model, llm.model_runner.kv_cache
    weight_bytes = sum(param.nbytes for param in model.parameters())
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        weight_bytes -= model.model.embed_tokens.weight.nbytes
    positions = sum(
        (num_out - 1) * len(prompt) + num_out * (num_out - 1) // 2
        for prompt, num_out in zip(*load, strict=True)
    )
    _, _, num_blocks, block_size, *_ = pool.shape
    return num_steps * weight_bytes + positions * (pool.nbytes // (num_blocks * block_size))


def measure(llm: TimedLLM, load: Workload, temperature: float) -> dict[str, float | None]:
    """Run the load once. What decode would give is None if all requests ask for one token, and
    ttft_ms unless there is one request: among many it would tell how long the queue is."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=num_out, ignore_eos=True)
        for num_out in load.output_lens
    ]
    preemptions = llm.stats()["preemptions"]
    llm.steps.clear()
    llm.begin = None
    start = perf_counter()
    outputs = llm.generate(load.prompts, params, use_tqdm=False)
    seconds = perf_counter() - start
    prompt_tokens = sum(len(prompt) for prompt in load.prompts)
    output_tokens = sum(len(output["token_ids"]) for output in outputs)
    run = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "seconds": seconds}
    run["output_tok_s"] = output_tokens / seconds
    for phase, sign in (("prefill", 1), ("decode", -1)):
        steps = [step for step in llm.steps if step[2] * sign > 0]
        run[f"{phase}_steps"] = len(steps)
        run[f"{phase}_tokens"] = tokens = sum(num_tokens * sign for _, _, num_tokens in steps)
        run[f"{phase}_seconds"] = phase_seconds = sum(end - begin for begin, end, _ in steps)
        run[f"{phase}_tok_s"] = tokens / phase_seconds if steps else None
    run["decode_step_ms"] = run["decode_gb_s"] = run["ttft_ms"] = None
    if run["decode_steps"]:
        run["decode_step_ms"] = 1e3 * run["decode_seconds"] / run["decode_steps"]
        num_bytes = decode_bytes(llm, load, run["decode_steps"])
        run["decode_gb_s"] = num_bytes / run["decode_seconds"] / 1e9
    if len(outputs) == 1:
        run["ttft_ms"] = 1e3 * (llm.steps[run["prefill_steps"] - 1][1] - start)
    run["preemptions"] = llm.stats()["preemptions"] - preemptions
    return run


def measure_all(llm: TimedLLM, args: argparse.Namespace, max_id: int) -> list[dict[str, Any]]:
    """Warm up, then one result per repeat. Raises ValueError if max_model_len cuts a request."""
    loads = [draw_workload(args, max_id, repeat) for repeat in range(args.repeats + 1)]
    longest = max(len(prompt) + num_out for prompt, num_out in zip(*loads[0], strict=True))
    if longest > llm.config.max_model_len:
        raise ValueError(
            f"a request of the workload has {longest} tokens, more than max_model_len="
            f"{llm.config.max_model_len}: raise --max-model-len, if the model allows more, "
            "or lower --max-input, --max-output"
        )
    warm_up = loads.pop()
    short = [min(num_out, 8) for num_out in warm_up.output_lens]
    measure(llm, warm_up._replace(output_lens=short), args.temperature)
    return [measure(llm, load, args.temperature) for load in loads]


# --- report ---------------------------------------------------------------------------------------


def version(module: str) -> str | None:
    try:
        return getattr(importlib.import_module(module), "__version__", "unknown")
    except (ImportError, OSError):
        return None


def description(llm: LLM, args: argparse.Namespace, max_id: int) -> dict[str, Any]:
    """What was measured, with what, and the memory that it took."""
    runner = llm.model_runner
    memory = {"gpu": None, "peak_reserved_gib": None, "driver_used_gib": None}
    if runner.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        memory = {
            "gpu": torch.cuda.get_device_name(),
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "driver_used_gib": (total - free) / 2**30,
        }
    modules = ("torch", "triton", "transformers", "flash_attn")
    return {
        "model": args.dummy or args.model,
        "workload": {name: getattr(args, name) for name in WORKLOAD} | {"max_token_id": max_id},
        "settings": asdict(llm.config),
        "versions": {"python": platform.python_version()} | {m: version(m) for m in modules},
        "device": str(runner.device),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "cuda_graphs": runner.graphs is not None,
        "kv_blocks": runner.num_kvcache_blocks,
        **memory,
    }


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON line. Raises ValueError for a model, setting or workload that is refused."""
    with model_folder(args) as folder:
        start = perf_counter()
        llm = TimedLLM(folder, **{name: getattr(args, name) for name in SETTINGS})
        init_seconds = perf_counter() - start
    with llm:
        max_id = min(args.max_token_id, llm.vocab_size - 1)
        if args.profile:
            prompts = draw_workload(args, max_id).prompts
            batches = [prompts, prompts[:1]] if len(prompts) > 1 else [prompts]
            measured = {"profile": profile_decode(llm, batches, args.temperature)}
        else:
            runs = measure_all(llm, args, max_id)
            measured = {
                name: value if value is None else median(run[name] for run in runs)
                for name, value in runs[0].items()
            }
            measured["repeats"] = runs
        return description(llm, args, max_id) | {"init_seconds": init_seconds} | measured


def print_report(report: dict[str, Any]) -> None:
    """For people, then the JSON line."""
    repeats = report.get("repeats", [{}])
    for name, value in report.items():
        if name in repeats[0] and value is not None:
            each = " ".join(f"{run[name]:,.6g}" for run in repeats)
            print(f"{name:18} {value:,.6g} (median of {each})")
        elif name == "profile":
            for result in value:
                print("", *profile_lines(result), sep="\n")
        elif name != "repeats":
            print(f"{name:18} {value}")
    print(json.dumps(report))


if __name__ == "__main__":
    try:
        print_report(bench(parse_args()))
    except ValueError as error:  # a bad folder, setting or load; the message says what to do
        sys.exit(f"bench.py: {error}")
