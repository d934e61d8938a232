"""Tools around the engine, which never imports them: watch a run, draw it, verify it."""

from pathlib import Path

BUNDLED_MODEL = Path(__file__).parents[2] / "tests" / "assets" / "tiny-qwen3"  # in a checkout
