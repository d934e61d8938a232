"""Products with few rows, against float64; where they are used, and into how many parts they are
split. In Triton's interpreter where there is no GPU."""

import pytest
import torch
from numerics import BF16, F16, F32, assert_close, surrounded

from nanovllm.layers import kernels
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.utils.parallel import TensorParallel

few_rows = pytest.importorskip("nanovllm.layers.few_rows", reason="triton is not installed")
fused_kernels = pytest.importorskip("nanovllm.layers.fused_kernels")

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.usefixtures("poisoned"), *([pytest.mark.gpu] if ON_GPU else [])]

# The interpreter's products of bfloat16 matrices are wrong; a single row takes no such product.
HALF = BF16 if ON_GPU else F16


def operands(
    rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in] and weight [out, in] for `shape` (out, in), in the midst of NaN."""
    x = surrounded(torch.randn(rows, shape[1]), device, dtype)
    return x, surrounded(torch.randn(*shape) / shape[1] ** 0.5, device, dtype)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64])
@pytest.mark.parametrize("shape", [(48, 96), (200, 512), (33, 1100)], ids=str)
def test_product(shape: tuple[int, int], rows: int, device: torch.device) -> None:
    """Outputs and inputs that are, and are not, multiples of a tile."""
    x, weight = operands(rows, shape, HALF, device)
    out = few_rows.few_rows_linear(x, weight)
    assert out.dtype == HALF
    assert_close(out, exact(x, weight), "product")


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("rows", [1] if not ON_GPU else [1, 3])
def test_product_in_each_dtype(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = operands(rows, (70, 700), dtype, device)
    assert_close(few_rows.few_rows_linear(x, weight), exact(x, weight), "product")


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize(
    ("shape", "parts", "made"),
    [((48, 1100), 2, 2), ((48, 1100), 3, 3), ((40, 2100), 3, 3), ((40, 1024), 8, 2)],
    ids=str,
)
def test_parts_add_up(
    shape: tuple[int, int], parts: int, made: int, rows: int, device: torch.device
) -> None:
    """Each a multiple of 512 inputs, so that there may be fewer than asked for; in float32, as
    their sum was not rounded yet."""
    x, weight = operands(rows, shape, HALF, device)
    out = few_rows.few_rows_linear(x, weight, parts=parts)
    assert out.shape == (made, rows, shape[0]) and out.dtype == F32
    assert_close(out.sum(0), exact(x, weight), "product")
    per_part = -(-shape[1] // parts // 512) * 512 if made == parts else 512
    first = exact(x[:, :per_part], weight[:, :per_part])
    assert_close(out[0], first, "product")


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("shape", [(2 * 48, 96), (2 * 50, 600)], ids=str)
def test_silu_times_up(shape: tuple[int, int], rows: int, device: torch.device) -> None:
    """The weight is [gate; up]; a width that is no multiple of a tile must not mix the two."""
    x, weight = operands(rows, shape, HALF, device)
    out = few_rows.few_rows_linear(x, weight, silu=True)
    gate, up = exact(x, weight).chunk(2, dim=1)
    assert out.shape == (rows, shape[0] // 2) and out.dtype == HALF
    assert_close(out, gate * gate.sigmoid() * up, "product")


# --- where it is used -----------------------------------------------------------------------------


def test_who_is_served(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """In half precision: one row always, up to MAX_ROWS where the output is narrow."""
    most = few_rows.MAX_ROWS
    narrow, wide = (torch.zeros(few_rows.NARROW + i, 8, device=device) for i in (0, 1))

    def serves(rows: int, weight: torch.Tensor, dtype: torch.dtype = BF16) -> bool:
        return few_rows.serves(torch.zeros(rows, 8, dtype=dtype, device=device), weight)

    assert serves(1, narrow) == ON_GPU, "on a CPU the plain product is right"
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    assert serves(1, narrow) and serves(1, wide) and serves(1, wide, F16)
    assert serves(most, narrow) and not serves(most + 1, narrow) and not serves(2, wide)
    assert not serves(1, narrow, F32)


def test_parts_are_of_512_inputs_at_least() -> None:
    """Several for Qwen3-0.6B's o and down projections; one for a weight that has enough outputs by
    itself, and for a tiny one."""
    shapes = [(1024, 2048), (1024, 3072), (64, 513), (8192, 1024), (64, 64), (100_000, 4096)]
    parts = [few_rows.num_parts(torch.empty(shape, device="meta")) for shape in shapes]
    for count, (_, in_features) in zip(parts, shapes, strict=True):
        assert 1 <= count <= -(-in_features // 512)
    assert min(parts[:3]) > 1 and parts[3:] == [1, 1, 1]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_split_product_and_the_norm_after_it(
    rows: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """As in a layer: a row-parallel projection whose summands the next norm adds up, against the
    plain layers."""
    proj = RowParallelLinear(1100, 64, False, TensorParallel())
    proj.weight.data = (torch.randn(64, 1100) / 33).to(device, HALF)
    norm = RMSNorm(64, 1e-6)
    norm.weight.data = (torch.rand(64) + 0.5).to(device, HALF)
    x = torch.randn(rows, 1100).to(device, HALF)
    residual = torch.randn(rows, 64).to(device, HALF)
    total = exact(x, proj.weight) + residual.double()
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    summands = proj(x)
    assert summands.shape == (3, rows, 64)
    out, new = norm.add_norm(summands, residual)
    assert_close(new, total, "product")
    monkeypatch.setattr(kernels, "usable", lambda x: False)
    assert_close(out, norm(new).float(), "product")
