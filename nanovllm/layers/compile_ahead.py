"""compile_ahead: the Triton kernels of some work, compiled all at once. Needs triton to import."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import triton

from nanovllm.utils.interrupts import collector_held

_RUNNING = threading.Lock()  # Triton's launch, which is replaced meanwhile, is the whole process's


def compile_ahead(work: Callable[[], None]) -> None:
    """Compile in threads, on all cores, those kernels that `work` launches and this process has not
    compiled yet. `work` runs for that, but none of its kernels does: what they would have written
    stays as it was, so `work` must use it for nothing but more numbers, never as an index. Raises
    the error of a kernel that does not compile. Before Triton 3.5 nothing is done, `work` does not
    run: each kernel is compiled by its first launch."""
    if hasattr(triton, "AsyncCompileMode"):
        # In a context of its own, where an error cannot leave Triton's asynchronous mode on.
        copy_context().run(_compile, work)


def _compile(work: Callable[[], None]) -> None:
    function, thread = triton.runtime.JITFunction, threading.get_ident()

    def only_compile(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        # Not even what is compiled already is launched, on what the others have not written.
        return run(self, *args, warmup=warmup or threading.get_ident() == thread, **kwargs)

    # Python 3.11's parser fails if the collector lets another thread parse in its midst.
    with _RUNNING, collector_held(), ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        run = function.run
        try:
            function.run = only_compile
            work()
        finally:
            function.run = run
