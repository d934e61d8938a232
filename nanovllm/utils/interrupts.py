"""Ctrl-C and the garbage collector may come between any two lines. Here they are held back while
several parts of a record change together."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C during the block raises at the end of it instead of in its midst. The block must not
    wait for long: what waits for the model is in it only where several ranks work together, which
    have a way out of their own (engine/workers.py). Does nothing in a thread that Ctrl-C does not
    reach."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *args: caught.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for args in caught:
            handler(*args)


@contextmanager
def collector_held() -> Iterator[None]:
    """The garbage collector does not run during the block. It may close a forgotten `stream`, whose
    requests end with it, and a step must not lose sequences that it has chosen."""
    enabled = gc.isenabled()
    try:
        try:
            gc.disable()
            yield
        finally:
            if enabled:
                gc.enable()
    finally:  # once more: a Ctrl-C may have come before the first
        if enabled:
            gc.enable()
