"""Kernels: each fused kernel against plain torch, on the same made-up inputs. A new kernel gets a
row here.

Kernels are compared in the engine's half precision, or in float16 if it has none. Without a GPU
they run in Triton's interpreter, if TRITON_INTERPRET=1 was set before triton was imported; always
in float16: of matrices in bfloat16 the interpreter multiplies the bit patterns.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from nanovllm import LLM
from nanovllm.layers import kernels
from nanovllm.layers.attention import AttentionFunction, store_kv, torch_attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sampler import SamplingInputs, sample_torch
from nanovllm.tools.comparison import EXACT, Comparison, NotRun, Numbers, Row, compare, measured
from nanovllm.utils.context import Context

EPS = 1e-6
BLOCK_SIZE = 256  # what flash-attn needs
CONTEXTS = (1, 256, 257, 0, 700)  # of a decode: short, cut in two and six, a padding row
CHUNKS = ((130, 0), (1, 256), (70, 300))  # of a prefill: new positions, and those before them
IN, OUT = 1248, 96  # of a matrix product: an input too long for one part, and no multiple of one


def kernel_rows(llm: LLM) -> Iterator[Row]:
    """The comparisons, in the shapes of the engine's attention and vocabulary."""
    cases = KernelCases(llm)
    for name, run in (
        ("add + RMSNorm", cases.add_norm),
        ("add + RMSNorm of summands", cases.add_norm_of_summands),
        ("norm + RoPE + KV store", cases.norm_rope_store),
        ("SiLU x up", cases.silu_and_mul),
        ("few rows", cases.few_rows),
        ("few rows, in parts", partial(cases.few_rows, parts=3)),
        ("one row, norm + SiLU x up", cases.one_row),
        ("decode attention", cases.decode_attention),
        ("decode attention's KV store", cases.decode_store),
    ):
        yield compare(name, "torch, float32", lambda run=run: _with_triton(llm, run))
    for phase in ("prefill", "history"):
        run = getattr(cases, f"attention_{phase}")
        yield compare(f"attention, {phase}", "torch, float32", run)
    for name, run in (("positions and slots", cases.places), ("sampler", cases.sampler)):
        yield compare(name, "plain torch", lambda run=run: _with_triton(llm, run))


def _with_triton(llm: LLM, run: Callable[[], Comparison]) -> Comparison:
    if not kernels.HAS_TRITON:
        raise NotRun("triton is not installed")
    if llm.model_runner.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotRun("on the CPU it needs TRITON_INTERPRET=1 in the environment")
    return run()


class KernelCases:
    """Inputs of each kernel, and what it makes of them beside what plain torch makes of them."""

    def __init__(self, llm: LLM) -> None:
        runner = llm.model_runner
        layer = runner.model.model.layers[0].self_attn
        self.device, self.vocab_size = runner.device, llm.vocab_size
        as_is = runner.dtype != torch.float32 and self.device.type == "cuda"
        self.dtype = runner.dtype if as_is else torch.float16
        self.attention, self.scale = layer.attn.attention, layer.attn.scale
        self.num_heads, self.num_kv_heads = layer.qkv_proj.num_heads, layer.qkv_proj.num_kv_heads
        self.head_dim = layer.head_dim
        self.rotary = RotaryEmbedding(self.head_dim, 1024, 1e4).to(self.device)
        self.generator = torch.Generator().manual_seed(0)
        self.weights = self._random(self.head_dim), self._random(self.head_dim)  # of q and k norm
        # The arguments after qkv of the kernels that do both.
        rope = self.rotary.cos, self.rotary.sin
        self.norm_and_rope = (self.num_kv_heads, *rope, *self.weights, EPS)

    # --- element-wise, and products ---

    def add_norm(self) -> Comparison:
        return self._add_norm(self._random(5, IN))

    def add_norm_of_summands(self) -> Comparison:
        """As `few_rows` in parts gives them."""
        return self._add_norm(self._random(3, 5, IN).float())

    def _add_norm(self, x: torch.Tensor) -> Comparison:
        """With a residual and without."""
        from nanovllm.layers.fused_kernels import add_rms_norm

        residual, weight = self._random(5, IN), self._random(IN)
        actual = [out for y in (residual.clone(), None) for out in add_rms_norm(x, y, weight, EPS)]

        def plain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Numbers:
            x = x.sum(0).to(weight.dtype) if x.dim() == 3 else x
            return [_norm(x + residual, weight), x + residual, _norm(x, weight), x]

        return self._judged(actual, plain, x, residual, weight)

    def silu_and_mul(self) -> Comparison:
        from nanovllm.layers.fused_kernels import silu_and_mul_fused

        x = self._random(5, 2 * IN)
        return self._judged([silu_and_mul_fused(x)], lambda x: [_silu_and_mul(x)], x)

    def few_rows(self, parts: int = 1) -> Comparison:
        """Five rows; or four and one, which is never split and is multiplied in registers."""
        from nanovllm.layers.few_rows import few_rows_linear

        x, weight = self._random(5, IN), self._random(OUT, IN) / 32
        outs = [few_rows_linear(rows, weight, parts) for rows in x.split(4 if parts == 1 else 5)]
        actual = torch.cat(outs) if parts == 1 else outs[0].sum(0)
        return self._judged([actual], lambda *xs: [F.linear(*xs)], x, weight)

    def one_row(self) -> Comparison:
        """With a residual, and without, but with SiLU; of the sum the first numbers."""
        from nanovllm.layers.few_rows import one_row_linear

        x, residual, norm = (self._random(1, IN) for _ in range(3))
        weight = self._random(2 * OUT, IN) / 32
        y, total = one_row_linear(x, weight[:OUT], False, residual, norm[0], EPS)
        actual = [y, total[:, :OUT], one_row_linear(x, weight, True, None, norm[0], EPS)[0]]

        def plain(x: torch.Tensor, *others: torch.Tensor) -> Numbers:
            residual, norm, weight = others
            rows = [F.linear(_norm(row, norm[0]), weight) for row in (x + residual, x)]
            return [rows[0][:, :OUT], (x + residual)[:, :OUT], _silu_and_mul(rows[1])]

        return self._judged(actual, plain, x, residual, norm, weight)

    # --- attention, and what is stored for it ---

    def norm_rope_store(self) -> Comparison:
        """The first and the last slot, another block, and a padding row among them."""
        from nanovllm.layers.fused_kernels import norm_rope_store

        slots = self._ints([3 * BLOCK_SIZE - 1, -1, BLOCK_SIZE, 0, 2 * BLOCK_SIZE + 1])
        positions = self._ints([0, 1, 255, 256, 1023])
        (_, pool), qkv = self._pool(1), self._qkv(5)

        def plain(qkv: torch.Tensor, pool: torch.Tensor) -> Numbers:
            *qkv, pool = self._plain(qkv, pool, positions, slots)
            return [*qkv, *pool]

        fused, caches = qkv.clone(), pool.clone()
        norm_rope_store(fused, *self.norm_and_rope, *caches, positions, slots)
        return self._judged([*self._split(fused), *caches], plain, qkv, pool)

    def decode_attention(self) -> Comparison:
        return self._decode(stored=False)

    def decode_store(self) -> Comparison:
        """A row of its own: next to the numbers of the pool, the small ones of the outputs would
        hardly count."""
        return self._decode(stored=True)

    def _decode(self, stored: bool) -> Comparison:
        from nanovllm.layers.decode_attention import DecodeAttention

        lens, (tables, pool), qkv = self._ints(CONTEXTS), self._pool(), self._qkv(len(CONTEXTS))
        positions, slots = _places(lens, tables)
        context = Context(False, slots, context_lens=lens, block_tables=tables)

        def plain(qkv: torch.Tensor, pool: torch.Tensor) -> Numbers:
            q, k, v, pool = self._plain(qkv, pool, positions, slots)
            out = torch_attention(q, k, v, *pool, context, self.scale)
            return list(pool) if stored else [out[lens > 0]]

        attention = DecodeAttention()
        caches = pool.clone()
        attention.plan(context, self.num_heads, caches[0])
        lens.clone()  # any kernel, as a model's embedding
        out = attention(qkv, *self.norm_and_rope, *caches, context, self.scale)
        return self._judged(list(caches) if stored else [out[lens > 0]], plain, qkv, pool)

    def attention_prefill(self) -> Comparison:
        """Prompts from their first position on."""
        return self._prefill(tuple((new, 0) for new, _ in CHUNKS))

    def attention_history(self) -> Comparison:
        """Chunks and prefix hits: the positions before are read from the pool."""
        return self._prefill(CHUNKS)

    def _prefill(self, chunks: tuple[tuple[int, int], ...]) -> Comparison:
        if self.attention is torch_attention:
            raise NotRun("this engine's prefill attention is plain torch itself")
        tables, pool = self._pool(len(chunks))
        lens_q, lens_k = [new for new, _ in chunks], [new + old for new, old in chunks]
        slots = tables.unsqueeze(2) * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=self.device)
        spans = zip(slots.flatten(1), lens_q, lens_k, strict=True)
        slot_mapping = torch.cat([positions[k - q : k] for positions, q, k in spans])
        context = Context(
            is_prefill=True,
            slot_mapping=slot_mapping,
            cu_seqlens_q=F.pad(self._ints(lens_q).cumsum(0), (1, 0)).int(),
            cu_seqlens_k=F.pad(self._ints(lens_k).cumsum(0), (1, 0)).int(),
            max_seqlen_q=max(lens_q),
            max_seqlen_k=max(lens_k),
            block_tables=tables if lens_q != lens_k else None,
        )
        q = self._random(len(slot_mapping), self.num_heads, self.head_dim)

        def by(attention: AttentionFunction, q: torch.Tensor, pool: torch.Tensor) -> Numbers:
            k, v = pool.flatten(1, 2)[:, slot_mapping]  # stored already
            return [attention(q, k, v, *pool, context, self.scale)]

        return self._judged(by(self.attention, q, pool), partial(by, torch_attention), q, pool)

    # --- exact ---

    def places(self) -> Comparison:
        """Where the new positions of a decode step stand."""
        from nanovllm.layers.decode_kernels import positions_and_slots

        context_lens, (tables, _) = self._ints(CONTEXTS), self._pool()
        actual = positions_and_slots(context_lens, tables, BLOCK_SIZE)
        return [torch.stack(actual)], [torch.stack(_places(context_lens, tables))], EXACT

    def sampler(self) -> Comparison:
        """Rows with and without each filter, two of each: one may draw what the filter leaves. The
        noise is the same, so the tokens are. And a graph's next step: contexts longer by one."""
        from nanovllm.layers.sampler_kernels import sample_triton

        logits, everything = 4 * self._random(16, self.vocab_size), self.vocab_size
        logits[::8, everything // 2] = 99  # greedy rows: in half precision their maxima could tie
        numbers = {
            "temperatures": [0, 0.7, 4, 1e-5, 4, 4, 4, 4],  # hot, so that the filters matter
            "top_p": [1, 1, 1, 1, 1, 0.9, 1, 0.05],
            "min_p": [0, 0, 0.5, 0, 0, 0, 0.05, 0],
        }
        inputs = SamplingInputs(
            seeds=torch.arange(16, device=self.device),
            positions=torch.arange(16, device=self.device),
            top_k=self._ints(2 * ([everything] * 4 + [1, 20, 50, everything])),
            **{name: torch.tensor(2 * x, device=self.device) for name, x in numbers.items()},
        )
        next_ids, context_lens = self._ints([0] * 16), self._ints(2 * [3, 0, 9, 1, 1, 1, 1, 1])
        expected_ids = sample_torch(logits, inputs)
        expected = [expected_ids, expected_ids, context_lens + (context_lens > 0)]
        actual = [sample_triton(logits, inputs, (next_ids, context_lens)), next_ids, context_lens]
        actual, expected = (
            [F.one_hot(ids.long(), everything) for ids in many] for many in (actual, expected)
        )
        return actual, expected, EXACT

    # --- set-up ---

    def _random(self, *shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self.generator)
        return numbers.to(self.device, self.dtype)

    def _ints(self, numbers: tuple[int, ...] | list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _pool(self, num_seqs: int = len(CONTEXTS)) -> tuple[torch.Tensor, torch.Tensor]:
        """(block tables for CONTEXTS or CHUNKS, in no order; K and V of all their blocks)."""
        width = -(-max(CONTEXTS) // BLOCK_SIZE)
        blocks = torch.randperm(width * num_seqs, generator=self.generator)
        pool = self._random(2, len(blocks), BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        return blocks.view(-1, width).int().to(self.device), pool

    def _qkv(self, num_tokens: int) -> torch.Tensor:
        num_rows = self.num_heads + 2 * self.num_kv_heads
        return self._random(num_tokens, num_rows, self.head_dim)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)

    def _plain(
        self, qkv: torch.Tensor, pool: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """q and k, normalized and rotated, v, and a copy of the pool with k and v in it."""
        q, k, v = self._split(qkv)
        q, k = (_norm(x, w.to(x.dtype)) for x, w in zip((q, k), self.weights, strict=True))
        q, k = self.rotary(positions, q, k)
        pool = pool.clone()
        store_kv(k, v, *pool, slots)
        return q, k, v, pool

    def _judged(
        self, actual: Numbers, plain: Callable[..., Numbers], *given: torch.Tensor
    ) -> Comparison:
        """`actual` next to plain(*given in float32); the tolerance is plain(*given)'s own error."""
        own, exact = plain(*given), plain(*(x.float() for x in given))
        actual, own, exact = ([x.flatten(0, -2) for x in many] for many in (actual, own, exact))
        dtype = str(self.dtype).removeprefix("torch.")
        return actual, exact, measured(own, exact, f"plain torch's {dtype} error on the same")


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = RMSNorm(len(weight), EPS)
    norm.weight.data = weight
    return norm(x)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _places(context_lens: torch.Tensor, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(position, slot) of the last position of each context; (0, -1) for one of length 0."""
    positions = (context_lens - 1).clamp_min(0)
    blocks = tables.gather(1, (positions // BLOCK_SIZE).long().unsqueeze(1)).squeeze(1)
    slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return positions, slots.masked_fill(context_lens == 0, -1)
