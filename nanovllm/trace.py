"""Watch requests go through the engine, step by step.

    python -m nanovllm.trace                          walk A: one request of three ids
    python -m nanovllm.trace --walk chunk --svg chunk.svg
    python -m nanovllm.trace --model ~/Qwen3-0.6B --max-tokens 4 "The sky was" "Once upon a time"
    python -m nanovllm.trace --ids 5,6,7 --ids 8,9 --budget 4 --block-size 2 --json

Walks:
{walks}

One table row is one request in one step. "positions" are computed in the step and their K/V written
to "slots" of the KV pool; "cached" and "total" are counted before and after it. Completions never
end before --max-tokens.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from nanovllm import LLM
from nanovllm.tools import BUNDLED_MODEL
from nanovllm.tools.events import Step, letters
from nanovllm.tools.picture import draw
from nanovllm.tools.table import step_lines
from nanovllm.tools.walks import WALKS, Arrival, Walk

SETTINGS = {  # flag: the setting of LLM that it gives
    "block_size": "kvcache_block_size",
    "blocks": "num_kvcache_blocks",
    "budget": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the process with a message if it makes no sense."""
    walks = "\n".join(f"    {name:10} {walk.title}" for name, walk in WALKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.trace",
        description=__doc__.format(walks=walks),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text of a request")
    parser.add_argument(
        "--ids", metavar="IDS", type=_ids, action="append", default=[], help="or its ids: 5,6,7"
    )
    parser.add_argument("--walk", choices=WALKS, help="a named run, in place of own prompts")
    parser.add_argument(
        "--model", metavar="DIR", type=Path, default=BUNDLED_MODEL, help="default: the bundled one"
    )
    parser.add_argument("--device", default="auto", help="cuda, cpu, or auto")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="of each prompt; default: 8")
    parser.add_argument("--temperature", metavar="T", type=float, help="default: 0, greedy")
    for flag, setting in SETTINGS.items():
        name = f"--{flag.replace('_', '-')}"
        parser.add_argument(name, metavar="N", type=int, help=f"the engine's {setting}")
    parser.add_argument("--json", action="store_true", help="events, a JSON object a line")
    parser.add_argument(
        "--shapes",
        action="store_true",
        help="tensor shapes in layer 0 as well, of the modules that no fused kernel of a GPU skips",
    )
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw the run, too")
    args = parser.parse_args(argv)
    is_own = bool(args.prompts or args.ids)
    if is_own and args.walk:
        parser.error("--walk has its own prompts: give one or the other")
    if not is_own and (args.max_tokens is not None or args.temperature is not None):
        parser.error("--max-tokens and --temperature are for prompts of your own: give some")
    if args.svg and not args.svg.parent.is_dir():
        parser.error(f"--svg {args.svg}: there is no folder {args.svg.parent}")
    return args


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"give numbers like 5,6,7, not {text!r}") from None


def chosen_walk(args: argparse.Namespace) -> tuple[str, Walk]:
    """(title, walk) with the settings of the command line."""
    prompts = [*args.prompts, *args.ids]
    if prompts:
        max_tokens = 8 if args.max_tokens is None else args.max_tokens
        arrivals = [Arrival(p, max_tokens, temperature=args.temperature or 0.0) for p in prompts]
        title, walk = "your prompts", Walk("", arrivals)
    else:
        name = args.walk or "A"
        title, walk = f"walk {name}: {WALKS[name].title}", WALKS[name]
    given = {setting: getattr(args, flag) for flag, setting in SETTINGS.items()}
    settings = walk.settings | {name: value for name, value in given.items() if value is not None}
    # Eager on a GPU, too: while a CUDA graph replays there are no shapes to see.
    return title, replace(walk, settings=settings | {"enforce_eager": True})


def limits(llm: LLM) -> str:
    """What the engine has, and what a step may take."""
    config, num_blocks = llm.config, len(llm.scheduler.block_manager.blocks)
    return (
        f"pool: {num_blocks} blocks of {config.kvcache_block_size} positions; a step: at most "
        f"{config.max_num_batched_tokens} prefill positions, {config.max_num_seqs} requests"
    )


def legend(walk: Walk, llm: LLM) -> Iterator[str]:
    """Who is who."""
    for i, arrival in enumerate(walk.arrivals):
        ids = arrival.prompt
        if isinstance(ids, str):
            ids = llm.tokenizer.encode(ids)
        shown = str(ids) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:6]))}, ...]"
        joins = "" if arrival.step == 1 else f", joins before step {arrival.step}"
        yield f"{letters(i)}: {len(ids)} ids {shown}, max_tokens {arrival.max_tokens}{joins}"


def run(args: argparse.Namespace, write: Callable[[str], object] = print) -> list[Step]:
    """Trace what the command line asks for; `write` gets each line."""
    title, walk = chosen_walk(args)
    steps = []
    with LLM(args.model, device=args.device, **walk.settings) as llm:
        subtitle, block_size = limits(llm), llm.config.kvcache_block_size
        for line in () if args.json else (title, subtitle, *legend(walk, llm), ""):
            write(line)
        for step in walk.steps(llm, args.shapes):
            steps.append(step)
            lines = map(json.dumps, step.events()) if args.json else step_lines(step, block_size)
            for line in lines:
                write(line)
    if args.svg:
        drawing = draw(steps, title[0].upper() + title[1:], subtitle, block_size)
        args.svg.write_text(drawing, encoding="utf-8")
    return steps


if __name__ == "__main__":
    try:
        run(parse_args())
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
    except (ValueError, OSError) as error:  # a bad setting, folder, prompt or file
        sys.exit(f"trace: {error}")
