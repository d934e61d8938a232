"""Kernels: each fused kernel against plain torch, on the same inputs. A new kernel gets a row here.

Without a GPU the Triton kernels run in Triton's interpreter, if TRITON_INTERPRET=1 was set before
triton was imported.
"""

import os
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from nanovllm import LLM
from nanovllm.layers.attention import Attention, torch_attention
from nanovllm.layers.sampler import HAS_TRITON, SamplingInputs, sample_torch
from nanovllm.tools.comparison import EXACT, Comparison, NotRun, Row, compare, measured
from nanovllm.utils.context import get_context


def kernel_rows(llm: LLM, run: Callable[[LLM], object]) -> Iterator[Row]:
    """llm: an eager engine; run: makes it prefill, prefill with history, and decode."""
    yield compare("Triton KV store", "torch indexing", lambda: _kv_store(llm))
    yield compare("Triton sampler", "torch sampler", lambda: _sampler(llm))
    seen: dict[str, Comparison] = {}
    for phase in ("prefill", "history", "decode"):
        what = f"attention, {phase}"
        yield compare(what, "torch, float32", lambda phase=phase: _attention(llm, run, seen, phase))


def _kv_store(llm: LLM) -> Comparison:
    """The first and the last slot, another block, and a padding row among them."""
    _require_triton(llm)
    from nanovllm.layers.kv_store import store_kv_triton

    _, _, _, size, num_heads, head_dim = llm.model_runner.kv_cache.shape
    slots = [3 * size - 1, -1, size, 0, 2 * size + 1]
    k, v = _random(llm, 2, len(slots), num_heads, head_dim)
    actual, expected = k.new_zeros(2, 2, 3, size, num_heads, head_dim)
    store_kv_triton(k, v, *actual, torch.tensor(slots, dtype=torch.int32, device=k.device))
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[:, slot // size, slot % size] = torch.stack((k[row], v[row]))
    return [actual.flatten(0, -2)], [expected.flatten(0, -2)], EXACT


def _sampler(llm: LLM) -> Comparison:
    """Rows with and without each filter; the noise is the same, so the tokens are."""
    _require_triton(llm)
    from nanovllm.layers.sampler_kernels import sample_triton

    logits = 4 * _random(llm, 8, llm.vocab_size)
    logits[0, llm.vocab_size // 2] = 99  # the greedy row: in half precision its maximum could tie
    device, everything = logits.device, llm.vocab_size
    inputs = SamplingInputs(
        temperatures=torch.tensor([0, 0.7, 1, 1e-5, 1, 0.6, 1.5, 2], device=device),
        seeds=torch.arange(8, device=device),
        positions=torch.arange(8, device=device),
        top_k=torch.tensor([everything] * 4 + [1, 20, 50, everything], device=device).int(),
        top_p=torch.tensor([1, 1, 1, 1, 1, 0.9, 1, 0.5], device=device),
        min_p=torch.tensor([0, 0, 0.1, 0, 0, 0, 0.05, 0], device=device),
    )
    chosen = (sample_triton(logits, inputs), sample_torch(logits, inputs))
    actual, expected = (F.one_hot(ids, llm.vocab_size) for ids in chosen)
    return [actual], [expected], EXACT


def _attention(
    llm: LLM, run: Callable[[LLM], object], seen: dict[str, Comparison], phase: str
) -> Comparison:
    """What the first layer really computes, next to plain torch on what it was given."""
    if not seen:
        layer = next(m for m in llm.model_runner.model.modules() if isinstance(m, Attention))
        if layer.attention is torch_attention:
            raise NotRun("this engine's attention is plain torch itself")

        def note(_: Attention, qkv: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            context, given = get_context(), (*qkv, layer.k_cache, layer.v_cache)
            has_history = context.block_tables is not None
            name = ("history" if has_history else "prefill") if context.is_prefill else "decode"
            if name in seen:
                return
            own = torch_attention(*given, context, layer.scale)
            exact = torch_attention(*(x.float() for x in given), context, layer.scale)
            tolerance = measured([own], [exact], "the same error of plain torch in this dtype")
            seen[name] = ([out.clone()], [exact], tolerance)

        hook = layer.register_forward_hook(note)
        try:
            run(llm)
        finally:
            hook.remove()
    return seen[phase]


def _random(llm: LLM, *shape: int) -> torch.Tensor:
    runner = llm.model_runner
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(runner.device, runner.dtype)


def _require_triton(llm: LLM) -> None:
    if not HAS_TRITON:
        raise NotRun("triton is not installed")
    if llm.model_runner.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotRun("on the CPU it needs TRITON_INTERPRET=1 in the environment")
