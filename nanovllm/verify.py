"""Check that every way in which the engine computes something gives what a plainer way gives.

    python -m nanovllm.verify                          the bundled model
    python -m nanovllm.verify --model ~/Qwen3-0.6B --json

Logits are compared over the same tokens: largest absolute error, relative L2 error, and the share
of tokens whose most likely successor agrees. Both errors must be within the tolerance, which is
measured on the same tokens. Exit code: 0, or 1 if something failed, or 2 if nothing could run.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from time import perf_counter

import torch

from nanovllm.tools import BUNDLED_MODEL
from nanovllm.tools.comparison import Row

COLUMNS = ("optimized", "reference", "max abs", "rel. L2", "top-1", "tolerated", "from", "verdict")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the process with a message if it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", metavar="DIR", default=str(BUNDLED_MODEL), help="default: the bundled one"
    )
    parser.add_argument("--device", default="auto", help="cuda, cpu, or auto")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16, or auto")
    parser.add_argument(
        "--tp",
        metavar="N",
        type=int,
        choices=range(2, 9),
        action="append",
        default=[],
        help="compare TP=N on the CPU as well, in N processes",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    return parser.parse_args(argv)


def table(rows: list[Row]) -> Iterator[str]:
    """The rows in columns; where tolerances came from, and why rows are not PASS, below."""
    sources: dict[str, str] = {}
    for row in rows:
        if row.tolerance:
            sources.setdefault(row.tolerance.source, f"[{len(sources) + 1}]")
    lines = [COLUMNS, *(_cells(row, sources) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
    yield ""
    for source, mark in sources.items():
        yield f"{mark} {source}"
    for row in rows:
        if row.reason:
            yield f"{row.optimized}: {row.verdict}: {row.reason}"


def _cells(row: Row, sources: dict[str, str]) -> tuple[str, ...]:
    numbers = ("", "", "", "", "")
    if row.errors and row.tolerance:
        numbers = (
            f"{row.errors.max_abs:.1e}",
            f"{row.errors.relative_l2:.1e}",
            f"{row.errors.top1_agreement:.1%}",
            f"{row.tolerance.max_abs:.1e}, {row.tolerance.relative_l2:.1e}",
            sources[row.tolerance.source],
        )
    return (row.optimized, row.reference, *numbers, row.verdict)


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit code."""
    from nanovllm.tools.equivalences import Equivalences  # only now: it may import triton

    start = perf_counter()
    with Equivalences(args.model, args.device, args.dtype, args.tp) as equivalences:
        rows = list(equivalences.rows())
        about = equivalences.about()
    counts = {name: sum(r.verdict == name for r in rows) for name in ("PASS", "FAIL", "not run")}
    seconds = round(perf_counter() - start, 1)
    if args.json:
        report = {**about, **counts, "seconds": seconds, "rows": [row.as_dict() for row in rows]}
        print(json.dumps(report))
    else:
        print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
        print(*table(rows), sep="\n")
        print(", ".join(f"{n} {name}" for name, n in counts.items()) + f"; {seconds} s")
    return int(counts["FAIL"] > 0)


if __name__ == "__main__":
    args = parse_args()
    if args.device == "cpu" or not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
    try:
        sys.exit(run(args))
    except ValueError as error:  # a bad setting or folder; the message says what to do
        print(f"verify: {error}", file=sys.stderr)
        sys.exit(2)
