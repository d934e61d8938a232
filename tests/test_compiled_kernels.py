"""Every Triton kernel compiles for the GPUs that users have, and keeps to what they have. Needs no
GPU, only Triton's compiler, which the tests in Triton's interpreter do not ask."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nanovllm

# Four compilers at once want four cores; the first test of each waits for it.
pytestmark = pytest.mark.timeout(900)
triton = pytest.importorskip("triton")
pdl = pytest.importorskip("nanovllm.layers.pdl")

# Compute capability: KiB of shared memory that a block may use. 8.9 has as much as 8.6, and Triton
# writes the same code for both.
GPUS = {80: 163, 86: 99, 90: 227, 100: 227}
KERNELS = {
    name
    for path in Path(nanovllm.__file__).parent.glob("layers/*.py")
    for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(encoding="utf-8"), re.M)
}
WITH_PDL = {
    "_add_rms_norm_kernel",
    "_decode_attention_kernel",
    "_few_rows_kernel",
    "_one_row_kernel",
    "_sum_add_rms_norm_kernel",
}

Compilers = dict[int, tuple[subprocess.Popen, Path]]


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compilers]:
    """A process per GPU, all at once, and the folder that its kernels go to."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    started: Compilers = {}
    for gpu in GPUS:
        folder = tmp_path_factory.mktemp("kernels")
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, script, str(gpu), str(GPUS[gpu])],
                env={**env, "TRITON_CACHE_DIR": str(folder)},
                stdout=output,
                stderr=output,
            )
        started[gpu] = process, folder
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=GPUS, ids=lambda gpu: f"sm_{gpu}")
def gpu(request: pytest.FixtureRequest) -> int:
    if request.param >= 100 and triton.__version__.startswith("3.2."):
        pytest.skip("this Triton does not know the GPU")
    return request.param


@pytest.fixture(scope="module")
def kernels(gpu: int, compilers: Compilers) -> list[tuple[Path, dict[str, Any]]]:
    """The compiled kernels' files, without the suffix, and what Triton says about them."""
    process, folder = compilers[gpu]
    assert process.wait() == 0, (folder / "output.txt").read_text()
    found = [path for path in folder.glob("*/*.json") if not path.name.startswith("__grp__")]
    return [(path.with_suffix(""), json.loads(path.read_text())) for path in found]


def test_all_kernels_compile(kernels: list[tuple[Path, dict[str, Any]]], gpu: int) -> None:
    assert {path.name for path, _ in kernels} == KERNELS
    assert {about["target"]["arch"] for _, about in kernels} == {gpu}


def test_one_compilation_of_the_sampler_serves_batches_of_any_size(
    kernels: list[tuple[Path, dict[str, Any]]],
) -> None:
    """Each would cost half a second of every cold start."""
    names = [path.name for path, _ in kernels]
    dtypes = names.count("_silu_and_mul_kernel")  # compiled once in each
    assert names.count("_gumbel_argmax_kernel") == 2 * dtypes  # with a filter and without
    assert names.count("_pick_kernel") <= 3  # after a decode, after a prefill


def test_shared_memory_suffices(kernels: list[tuple[Path, dict[str, Any]]], gpu: int) -> None:
    """Else the launch fails, on that GPU only."""
    assert not [(path, n) for path, about in kernels if (n := about["shared"]) > GPUS[gpu] * 1024]


def test_registers_suffice(kernels: list[tuple[Path, dict[str, Any]]]) -> None:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for path, _ in kernels:
        command = [tool, "-res-usage", path.with_suffix(".cubin")]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        spilled = int(re.search(r" STACK:(\d+) ", usage)[1])
        assert spilled <= 32, (path, usage)  # a few may be ptxas' choice, to fit more warps


def test_dependent_launch_only_where_it_exists(
    kernels: list[tuple[Path, dict[str, Any]]], gpu: int
) -> None:
    """Who is launched early also waits; older GPUs know neither instruction."""
    launched = {path.name for path, about in kernels if about.get("launch_pdl")}
    assert launched == (WITH_PDL if gpu >= 90 and pdl.HAS_PDL else set())
    for path, about in kernels:
        ptx = path.with_suffix(".ptx").read_text()
        assert ("griddepcontrol.wait" in ptx) == bool(about.get("launch_pdl")), path
        assert ("griddepcontrol.launch_dependents" in ptx) == bool(about.get("launch_pdl")), path
