"""Tools around the engine, which never imports them: watch a run, draw it, verify it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUNDLED_MODEL = Path(__file__).parents[2] / "tests" / "assets" / "tiny-qwen3"  # in a checkout


@contextmanager
def replaced(owner: Any, name: str, method: Any) -> Iterator[None]:
    """Inside the block calls of `owner.name`, of this one object, go to `method`."""
    before = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)  # the class's own again
        else:
            setattr(owner, name, before)
