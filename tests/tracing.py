"""Running `python -m nanovllm.trace` inside a test."""

from nanovllm.tools.events import Step
from nanovllm.trace import parse_args, run


def trace(*arguments: str) -> tuple[list[str], list[Step]]:
    """The lines that the command prints on the CPU, and the steps that it saw."""
    lines: list[str] = []
    steps = run(parse_args(["--device", "cpu", *arguments]), lines.append)
    return lines, steps
