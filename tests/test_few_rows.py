"""Products with few rows, against float64; a single row's with the norm before it; where they are
used, and into how many parts they are split. In Triton's interpreter where there is no GPU."""

import pytest
import torch
from numerics import BF16, F16, F32, assert_close, surrounded

from nanovllm.layers import kernels
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
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


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 100])
@pytest.mark.parametrize(
    "shape", [(48, 96), (200, 512), (33, 1100), (2100, 700), (5, 4500)], ids=str
)
def test_product(shape: tuple[int, int], rows: int, device: torch.device) -> None:
    """Outputs and inputs that are, and are not, multiples of a tile; so many of the former that a
    tile of one row has 8, so many of the latter that they take two. Several rows have inputs that
    are multiples of 32."""
    if rows > 1:
        shape = shape[0], shape[1] // 32 * 32
    x, weight = operands(rows, shape, HALF, device)
    out = few_rows.few_rows_linear(x, weight)
    assert out.dtype == HALF
    assert_close(out, exact(x, weight), "product")
    given = torch.empty_like(out)
    assert few_rows.few_rows_linear(x, weight, out=given) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("rows", [1] if not ON_GPU else [1, 3])
def test_product_in_each_dtype(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = operands(rows, (70, 700 if rows == 1 else 704), dtype, device)
    assert_close(few_rows.few_rows_linear(x, weight), exact(x, weight), "product")


@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize(
    ("shape", "parts", "made"),
    [((48, 1120), 2, 2), ((48, 1120), 3, 3), ((40, 2144), 3, 3), ((40, 256), 8, 8)],
    ids=str,
)
def test_parts_add_up(
    shape: tuple[int, int],
    parts: int,
    made: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """Each a multiple of a tile's inputs, so that there may be fewer than asked for. The sum of
    what was rounded is as near as if it had been rounded itself."""
    monkeypatch.setattr(few_rows, "few_rows_tile", lambda *_: few_rows.Tile(16, 32, 32, 2))
    x, weight = operands(rows, shape, HALF, device)
    out = few_rows.few_rows_linear(x, weight, parts=parts)
    assert out.shape == (made, rows, shape[0]) and out.dtype == HALF
    assert_close(out.double().sum(0).to(HALF), exact(x, weight), "product")
    per_part = -(-shape[1] // parts // 32) * 32
    first = exact(x[:, :per_part], weight[:, :per_part])
    assert_close(out[0], first, "product")


@pytest.mark.parametrize("rows", [2, 17, 64])
@pytest.mark.parametrize("shape", [(2 * 48, 96), (2 * 50, 608), (2 * 40, 512)], ids=str)
def test_silu_times_up_of_several_rows(
    shape: tuple[int, int], rows: int, device: torch.device
) -> None:
    """A width that is no multiple of a tile must not mix gate and up."""
    x, weight = operands(rows, shape, HALF, device)
    out = few_rows.few_rows_linear(x, weight, silu=True)
    assert out.shape == (rows, shape[0] // 2) and out.dtype == HALF
    assert_close(out, gated(exact(x, weight), HALF), "product")


# --- one row: what stands before and after its product --------------------------------------------

EPS = 1e-6


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in float32 as the kernels round it; of bfloat16 the interpreter cuts the lower bits off."""
    if dtype == BF16 and not ON_GPU:
        x = (x.view(torch.int32) & -0x10000).view(F32)
    return x.to(dtype)


def normed(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float32, rounded once, as the separate kernel does it."""
    y = row.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * weight.float()
    return rounded(y, row.dtype)


def gated(product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """silu(gate) * up of [gate | up]; the gate is rounded before, as it is in the plain path."""
    gate, up = product.chunk(2, dim=1)
    gate = rounded(gate.float(), dtype).double()
    return gate * gate.sigmoid() * up


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(2 * 48, 96), (2 * 50, 600), (2 * 2100, 40)], ids=str)
def test_silu_times_up(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """The weight is [gate; up]; a width that is no multiple of a tile must not mix the two."""
    x, weight = operands(1, shape, dtype, device)
    out, same = few_rows.one_row_linear(x, weight, silu=True)
    assert out.shape == (1, shape[0] // 2) and out.dtype == dtype and same is x
    assert_close(out, gated(exact(x, weight), dtype), "product")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(
    "shape", [(48, 96), (90, 1024), (2 * 50, 600), (2100, 513), (33, 2048)], ids=str
)
def test_norm_and_product(
    shape: tuple[int, int], with_residual: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Of x + residual, which is also returned, rounded, and apart from the residual: programs that
    start later still read that."""
    x, weight = operands(1, shape, dtype, device)
    residual = surrounded(3 * torch.randn(1, shape[1]), device, dtype) if with_residual else None
    norm_weight = surrounded(torch.rand(shape[1]) + 0.5, device, dtype)
    before = None if residual is None else residual.clone()
    total = rounded(x.float() + residual.float(), dtype) if with_residual else x
    product = exact(normed(total, norm_weight), weight)
    for silu in (False, True)[: 1 + (shape[0] % 2 == 0)]:
        y, new = few_rows.one_row_linear(x, weight, silu, residual, norm_weight, EPS)
        assert_close(y, gated(product, dtype) if silu else product, "product")
        if with_residual:
            assert torch.equal(new, total) and torch.equal(residual, before)
        else:
            assert new is x


def test_norm_of_extreme_rows(device: torch.device) -> None:
    """Squares beyond float16; a row of zeros, whose norm only eps keeps finite."""
    weight = surrounded(torch.randn(40, 128) / 11, device, F16)
    ones = torch.ones(128, device=device, dtype=F16)
    for row in (torch.full((1, 128), 3e4), torch.zeros(1, 128)):
        x = surrounded(row, device, F16)
        y, _ = few_rows.one_row_linear(x, weight, False, None, ones, EPS)
        expected = exact(row.sign().to(device, F16), weight)
        assert torch.allclose(y.double(), expected, atol=2e-3 * max(expected.abs().max(), 1))


@pytest.mark.parametrize("silu", [False, True])
def test_a_row_too_long_to_be_normalized_by_every_program(
    silu: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Goes through the norm's own kernel: the same numbers."""
    x, weight = operands(1, (60, 300), F16, device)
    residual = torch.randn(1, 300).to(device, F16)
    norm_weight = torch.rand(300).to(device, F16)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return few_rows.one_row_linear(x, weight, silu, residual.clone(), norm_weight, EPS)

    y, total = run()
    monkeypatch.setattr(few_rows, "MAX_NORMED", 299)
    apart, same_total = run()
    assert torch.equal(total, same_total)
    assert_close(apart, y.double(), "product")


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("size", [1, 40, 1024, 1025, few_rows.MAX_NORMED])
def test_a_row_that_is_normalized_is_one_tile(size: int, silu: bool) -> None:
    """The kernel counts on it, whatever the number of outputs is."""
    for width in (1, 300, 5000, 200_000):
        outputs, inputs, warps = few_rows.one_row_tile(size, width, silu)
        assert inputs >= size and outputs * inputs * (1 + silu) <= 4096 * warps


# --- where it is used -----------------------------------------------------------------------------


def test_who_is_served(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """In half precision: one row always; up to 256 where the output is narrow and the sums may be
    split; up to 64 of a small weight, and of a large one whose sums may be split; up to 32 of one
    that has outputs enough."""

    def limit(outputs: int, inputs: int, may_split: bool = False) -> int:
        weight = torch.empty(outputs, inputs, device="meta")
        served = [few_rows.serves(x[:, :inputs], weight, may_split) for x in batches]
        assert served == sorted(served, reverse=True)
        return sum(served)

    row = torch.zeros(1, 32, dtype=BF16, device=device)
    weight = torch.empty(64, 32, device="meta")
    assert few_rows.serves(row, weight) == ON_GPU, "on a CPU the plain product is right"
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    assert few_rows.serves(row.half(), weight) and not few_rows.serves(row.float(), weight)
    batches = [torch.empty(rows, 12288, dtype=BF16, device="meta") for rows in range(1, 300)]
    assert limit(2048, 3072, may_split=True) == 256 and limit(2048, 3072) == 1
    assert limit(4096, 1024) == limit(6144, 1024) == 64  # Qwen3-0.6B: qkv, gate_up
    assert limit(4096, 12288, may_split=True) == 64 and limit(4096, 12288) == 1  # 8B: down
    assert limit(6144, 4096) == limit(24576, 4096) == 32  # 8B: qkv, gate_up
    assert limit(5120, 8192, may_split=True) == 1  # 32B: o
    assert limit(2048, 48, may_split=True) == limit(6144, 48) == 1  # no multiple of 32


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("silu", [False, True])
def test_tiles_fit_into_the_shared_memory(silu: bool, shared_kib: int) -> None:
    """Of GPUs that have less than the one it was measured on."""
    shared = shared_kib << 10
    for rows in (2, 16, 32, 33, 64, 65, 128, 129, 256):
        for inputs in (1024, 9728, 32 * 31):
            for outputs in (1024, 24576):
                tile = few_rows.few_rows_tile(rows, outputs, inputs, 1, silu, shared)
                num_rows = tile.rows + (2 if silu else 1) * tile.outputs
                assert num_rows * tile.inputs * tile.stages * 2 <= shared
                assert inputs % tile.inputs == 0 and tile.inputs >= 32


@pytest.mark.parametrize(
    ("rows", "weight", "parts", "silu", "tile"),
    [
        (16, (4096, 1024), 1, False, (16, 64, 256, 3)),
        (32, (4096, 1024), 1, False, (16, 64, 256, 3)),
        (33, (4096, 1024), 1, False, (32, 64, 256, 3)),
        (32, (6144, 1024), 1, True, (16, 64, 64, 5)),
        (64, (6144, 1024), 1, True, (32, 64, 128, 3)),
        (128, (1024, 3072), 4, False, (64, 64, 128, 4)),
        (256, (1024, 3072), 4, False, (64, 64, 64, 4)),
        (256, (1024, 2048), 2, False, (64, 64, 128, 4)),
        (17, (6144, 4096), 1, False, (32, 64, 128, 4)),
        (32, (24576, 4096), 1, True, (32, 64, 64, 5)),
        (64, (4096, 12288), 2, False, (64, 64, 256, 3)),
    ],
)
def test_tiles_are_those_that_were_measured(
    rows: int, weight: tuple[int, int], parts: int, silu: bool, tile: tuple[int, ...]
) -> None:
    assert few_rows.few_rows_tile(rows, *weight, parts, silu, 227 << 10) == tile


def test_who_is_split() -> None:
    """Qwen3-0.6B's o and down projections, and 8B's; not a weight that has enough outputs by
    itself, and never one row: all programs of the next norm read it."""
    shapes = [(1024, 2048), (1024, 3072), (4096, 4096), (4096, 12288), (6144, 4096), (6144, 1024)]
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    assert {few_rows.num_parts(1, weight) for weight in weights} == {1}
    for rows in (2, 128):
        assert [few_rows.num_parts(rows, weight) for weight in weights] == [4, 4, 2, 2, 1, 1]
    assert [few_rows.num_parts(129, weight) for weight in weights[:2]] == [2, 4]


def test_a_split_product_and_the_norm_after_it(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """As in a layer: a row-parallel projection whose summands the next norm adds up, against the
    plain layers."""
    proj = RowParallelLinear(1120, 64, False, TensorParallel(), turn=1)
    proj.weight.data = (torch.randn(64, 1120) / 33).to(device, HALF)
    norm = RMSNorm(64, 1e-6)
    norm.weight.data = (torch.rand(64) + 0.5).to(device, HALF)
    x = torch.randn(3, 1120).to(device, HALF)
    residual = torch.randn(3, 64).to(device, HALF)
    total = exact(x, proj.weight) + residual.double()
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    summands = proj(x)
    assert summands.shape[1:] == (3, 64) and len(summands) > 1
    out, new = norm.add_norm(summands, residual)
    assert_close(new, total, "product")
    monkeypatch.setattr(kernels, "usable", lambda x: False)
    assert_close(out, norm(new).float(), "product")


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layers_norm_and_product(
    bias: bool, silu: bool, rows: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """One kernel for a row without a bias. However it is done, it is what the plain layers do."""
    proj = MergedColumnParallelLinear(64, {"gate": 40, "up": 40}, bias, TensorParallel())
    norm = RMSNorm(64, EPS)
    for param in (*proj.parameters(), norm.weight):
        param.data = torch.randn(param.shape).to(device, HALF)
    proj.weight.data /= 8
    x, residual = (torch.randn(rows, 64).to(device, HALF) for _ in range(2))
    calls: list[int] = []
    product = few_rows.one_row_linear
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "usable", lambda x: True)
        patched.setattr(
            few_rows, "one_row_linear", lambda *args: calls.append(len(args)) or product(*args)
        )
        y, total = norm.add_norm_linear(x, residual.clone(), proj, silu)
    assert calls == ([6] if rows == 1 and not bias else [])
    monkeypatch.setattr(kernels, "usable", lambda x: False)
    expected, expected_total = norm.add_norm_linear(x, residual, proj, silu)
    assert torch.equal(total, expected_total)
    # The plain path rounds the norm and the product once more.
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=1e-2)
