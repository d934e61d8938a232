"""How near a kernel's result must be to the exact one, by what it computes and in which dtype."""

import torch

# (largest error over the largest exact number, relative L2). "product": sums of products, rounded
# once at the end; Triton's interpreter cuts bfloat16 off instead. "attention" rounds queries, keys
# and weights in between as well.
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCES = {
    "product": {F32: (1e-5, 5e-6), F16: (2e-3, 1e-3), BF16: (1e-2, 8e-3)},
    "attention": {F32: (2e-5, 1e-5), F16: (5e-3, 2e-3), BF16: (3e-2, 1e-2)},
}


def assert_close(actual: torch.Tensor, exact: torch.Tensor, kind: str) -> None:
    """`exact` is float32 or float64, computed from the same (rounded) inputs. NaN never passes."""
    assert actual.shape == exact.shape and actual.numel()
    error = actual.double() - exact.double()
    most, share = error.abs().max() / exact.abs().max(), error.norm() / exact.double().norm()
    most_allowed, share_allowed = TOLERANCES[kind][actual.dtype]
    report = f"largest error {most:.1e} (allowed {most_allowed}), L2 {share:.1e} ({share_allowed})"
    assert most <= most_allowed and share <= share_allowed, report


def surrounded(x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A dense copy of x on the device, with NaN in the memory before and after it."""
    margin = 4096
    memory = torch.full((x.numel() + 2 * margin,), torch.nan, device=device, dtype=dtype)
    memory[margin:-margin] = x.flatten().to(device, dtype)
    return memory[margin:-margin].view(x.shape)
