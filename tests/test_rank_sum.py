"""The sum over ranks with the norm after it: two and three processes that read each other's memory,
each in Triton's interpreter (tests/test_gpu_tp.py: GPUs)."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from numerics import assert_close

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.parallel import Summand

rank_sum = pytest.importorskip("nanovllm.layers.rank_sum", reason="triton is not installed")

EPS = 1e-6
SIGNALS, TURN = 1 << 12, 1 << 14  # bytes
# Rows of sums that follow each other, and their turns. The last ones reuse a buffer as soon as it
# may be.
SUMS = [(1, 0), (3, 1), (2, 2), (3, 1), (1, 2), (1, 0), (3, 1), (3, 0), (3, 1), (3, 0)]
SIZE = 72  # no power of two


def operands(rank: int, number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's summand of a sum, and the residual, which all ranks have."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(rows, SIZE, generator=generator)
    residual = torch.randn(rows, SIZE, generator=generator.manual_seed(number))
    return x.half(), residual.half()


def run_rank(rank: int, size: int, folder: str) -> None:
    """One rank's sums, and its results to a file. Prints as it ends."""
    parts = [
        torch.from_file(f"{folder}/{i}", shared=True, size=SIGNALS + 3 * TURN, dtype=torch.uint8)
        for i in range(size)
    ]
    is_lost = torch.zeros(1, dtype=torch.int32)
    memory = SimpleNamespace(
        addresses=torch.tensor([part.data_ptr() for part in (*parts, is_lost)]),
        # A while from where numbers wrap around to where they have.
        epochs=torch.full((4,), (1 << 31) - 4, dtype=torch.int32),
        rank=rank,
        size=size,
    )
    norm = RMSNorm(SIZE, EPS).half()
    norm.weight.data[:] = torch.linspace(0.5, 2, SIZE)
    results = []
    for number, (rows, turn) in enumerate(SUMS):
        x, residual = operands(rank, number, rows)
        offset = SIGNALS + turn * TURN
        mine = parts[rank][offset : offset + x.nbytes].view(x.dtype).view(x.shape)
        mine.copy_(x)
        out, total = norm.add_norm(Summand(mine, offset, memory), residual if number else None)
        results += [out.clone(), total.clone()]
    torch.save(results, f"{folder}/results{rank}")


@pytest.mark.parametrize("size", [2, 3])
def test_sums_over_processes(size: int, tmp_path: Path) -> None:
    """Right, and on all ranks the same to the last bit: a rank that drifted would sample other
    ids from then on."""
    first = torch.full((SIGNALS // 4,), (1 << 31) - 4, dtype=torch.int32).view(torch.uint8)
    for rank in range(size):
        memory = torch.cat([first, torch.zeros(3 * TURN, dtype=torch.uint8)])
        (tmp_path / str(rank)).write_bytes(memory.numpy().tobytes())
    script = "import os, sys; os.environ['TRITON_INTERPRET'] = '1'; import test_rank_sum as t; "
    command = [sys.executable, "-c", script + "t.run_rank(*map(int, sys.argv[1:3]), sys.argv[3])"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(tmp_path)], cwd=Path(__file__).parent)
        for rank in range(size)
    ]
    try:
        assert [process.wait(120) for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    results = [torch.load(tmp_path / f"results{rank}") for rank in range(size)]
    weight = torch.linspace(0.5, 2, SIZE).half()
    for number, (rows, _) in enumerate(SUMS):
        total = sum(operands(rank, number, rows)[0].double() for rank in range(size))
        if number:
            total += operands(0, number, rows)[1].double()
        for rank in range(size):
            out, rounded = results[rank][2 * number : 2 * number + 2]
            torch.testing.assert_close(rounded, total.half(), rtol=2**-10, atol=0)
            exact = rounded.double()
            exact *= torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * weight.double()
            assert_close(out, exact, "product")
            assert torch.equal(out, results[0][2 * number])
            assert torch.equal(rounded, results[0][2 * number + 1])


def test_a_sum_ends_when_a_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the other rank's signal does not come: with garbage, and without a hang."""
    monkeypatch.setattr(rank_sum, "SPINS", 4)
    part = torch.zeros(SIGNALS + TURN, dtype=torch.uint8)
    is_lost = torch.ones(1, dtype=torch.int32)
    addresses = torch.tensor([x.data_ptr() for x in (part, part, is_lost)])
    memory = SimpleNamespace(
        addresses=addresses, epochs=torch.zeros(4, dtype=torch.int32), rank=0, size=2
    )
    x = part[SIGNALS : SIGNALS + 6 * SIZE].view(torch.float16).view(3, SIZE)
    summand, weight = Summand(x, SIGNALS, memory), torch.ones(SIZE, dtype=torch.float16)
    out, _ = rank_sum.sum_add_rms_norm(summand, None, weight, EPS)
    assert out.shape == (3, SIZE)
