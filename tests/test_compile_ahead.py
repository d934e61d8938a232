"""The kernels of a start are compiled at once, in threads, and none is left for later. Needs no
GPU, only Triton's compiler."""

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
compile_ahead = pytest.importorskip("nanovllm.layers.compile_ahead").compile_ahead


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a start with all decode buckets and prefill graphs compiled, and when."""
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles in no threads")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_start.py"), "512"],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("kernels"))},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.timeout(300)
def test_no_kernel_of_a_start_is_compiled_late(start: dict[str, Any]) -> None:
    """Each would cost about half a second of every cold start, one after the other."""
    assert not start["late"]
    assert {
        "_add_rms_norm_kernel",
        "_decode_attention_kernel",
        "_few_rows_kernel",
        "_gumbel_argmax_kernel",
        "_norm_rope_store_kernel",
        "_one_row_kernel",
        "_pick_kernel",
        "_positions_and_slots_kernel",
        "_silu_and_mul_kernel",
        "_work_list_kernel",
    } == set(start["ahead"])


def test_a_kernel_that_does_not_compile_raises_as_by_its_launch(start: dict[str, Any]) -> None:
    ahead, launched = start["errors"]
    assert "CompilationError" in ahead and "no_such_name" in ahead
    assert ahead == launched


def test_an_older_triton_compiles_by_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton, "AsyncCompileMode", raising=False)
    ran: list[str] = []
    run = triton.runtime.JITFunction.run
    compile_ahead(lambda: ran.append("work"))
    assert not ran
    assert triton.runtime.JITFunction.run is run


def test_a_failure_of_the_work_leaves_triton_as_it_was() -> None:
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles in no threads")
    run = triton.runtime.JITFunction.run

    def fail() -> None:
        assert triton.runtime.JITFunction.run is not run
        assert not gc.isenabled(), "threads that parse meanwhile fail in Python 3.11"
        raise ValueError("no memory")

    for _ in range(2):
        with pytest.raises(ValueError, match="no memory"):
            compile_ahead(fail)
    assert triton.runtime.JITFunction.run is run
    assert gc.isenabled()


def test_two_engines_that_start_at_once_take_turns() -> None:
    """The first to end would else let the second one's work launch what is not compiled, and the
    second leave the first one's thread unable to launch anything."""
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles in no threads")
    run = triton.runtime.JITFunction.run
    first_began, second_began, first_ended = (threading.Event() for _ in range(3))
    together: list[bool] = []

    def first() -> None:
        first_began.set()
        together.append(second_began.wait(0.3))

    def second() -> None:
        second_began.set()
        first_ended.wait(10)
        together.append(triton.runtime.JITFunction.run is run)

    def start_first() -> None:
        compile_ahead(first)
        first_ended.set()

    threads = [threading.Thread(target=start_first)]
    threads.append(threading.Thread(target=lambda: first_began.wait(10) and compile_ahead(second)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert together == [False, False]
    assert triton.runtime.JITFunction.run is run
