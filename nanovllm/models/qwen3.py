"""Qwen3ForCausalLM: the dense Qwen3 decoder, written for any number of tensor-parallel ranks.

    embedding -> N x [RMSNorm, attention, RMSNorm, SwiGLU MLP] -> RMSNorm -> LM head

T is the number of positions of the step, N of its sequences. Weights arrive through utils/loader.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import nn

from nanovllm.layers import kernels
from nanovllm.layers.attention import Attention, AttentionFunction
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import get_context
from nanovllm.utils.hf import ModelConfig
from nanovllm.utils.parallel import Summand, TensorParallel

# Hidden states [T, hidden], and the residual [T, hidden] that they are still to be added to; of N
# rows behind the last attention of a prefill. Layers hand on both, so that the next norm's kernel
# does the addition too, and of a Summand the sum over the ranks; or one row's product all of it.
Stream: TypeAlias = tuple[torch.Tensor | Summand, torch.Tensor | None]


class Shared(NamedTuple):
    """What all layers of a model have in common."""

    config: ModelConfig
    tp: TensorParallel
    attention: AttentionFunction
    rotary: RotaryEmbedding  # one table
    decode_attention: Callable[..., torch.Tensor] | None  # None: decode by `attention` too


class Qwen3Attention(nn.Module):
    """Grouped-query attention with per-head RMSNorm of q and k before RoPE."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        config, tp, attention, self.rotary, self.decode_attention = shared
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.attention_bias,
            tp,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            config.attention_bias,
            tp,
            turn=1,  # after the embedding's and the MLP's before
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention(attention, config.head_dim**-0.5)

    def forward(
        self,
        positions: torch.Tensor,
        norm: RMSNorm,
        stream: Stream,
        rows: torch.Tensor | None = None,
    ) -> Stream:
        """rows: the only ones that go on from here, if not all do."""
        qkv, residual = norm.add_norm_linear(*stream, self.qkv_proj)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))  # [T, heads + 2 kv, d]
        if kernels.usable(qkv):
            out = self._fused(positions, qkv)
        else:
            q, k, v = self._split(qkv)
            q, k = self.rotary(positions, self.q_norm(q), self.k_norm(k))
            out = self.attn(q, k, v)
        if rows is not None:
            out, residual = out[rows], residual[rows]
        return self.o_proj(out.flatten(1)), residual  # [T, hidden], or [N, hidden]

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        num_kv_heads = self.qkv_proj.num_kv_heads
        return qkv.split((self.qkv_proj.num_heads, num_kv_heads, num_kv_heads), dim=1)

    def _fused(self, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """The same from qkv to the attention's output, in one kernel (decode) or two (prefill)."""
        from nanovllm.layers.fused_kernels import norm_rope_store

        context, attn = get_context(), self.attn
        norm_and_rope = (
            self.qkv_proj.num_kv_heads,
            self.rotary.cos,
            self.rotary.sin,
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
            attn.k_cache,
            attn.v_cache,
        )
        if not context.is_prefill and self.decode_attention is not None:
            return self.decode_attention(qkv, *norm_and_rope, context, attn.scale)
        norm_rope_store(qkv, *norm_and_rope, positions, context.slot_mapping)
        return attn.attend(*self._split(qkv))


class Qwen3MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), x being the norm of the stream"""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, {"gate": width, "up": width}, False, tp, "intermediate_size"
        )
        self.down_proj = RowParallelLinear(
            width, config.hidden_size, False, tp, turn=2, what="intermediate_size"
        )

    def forward(self, norm: RMSNorm, stream: Stream) -> Stream:
        y, residual = norm.add_norm_linear(*stream, self.gate_up_proj, silu=True)
        return self.down_proj(y), residual


class Qwen3DecoderLayer(nn.Module):
    """One block. Its halves are given the norms before them."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        config = shared.config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(shared)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config, shared.tp)

    def forward(
        self, positions: torch.Tensor, stream: Stream, rows: torch.Tensor | None = None
    ) -> Stream:
        stream = self.self_attn(positions, self.input_layernorm, stream, rows)
        return self.mlp(self.post_attention_layernorm, stream)


class Qwen3Model(nn.Module):
    """Token ids to the normalized hidden states that are sampled from: in prefill each sequence's
    last, for which alone the last layer goes on after it has stored K and V and attended."""

    def __init__(
        self, config: ModelConfig, attention: AttentionFunction, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.decode_attention = None
        if kernels.usable(self.embed_tokens.weight):
            from nanovllm.layers.decode_attention import DecodeAttention

            self.decode_attention = DecodeAttention()
        rotary = RotaryEmbedding(config.head_dim, config.max_position_embeddings, config.rope_theta)
        shared = Shared(config, tp, attention, rotary, self.decode_attention)
        layers = (Qwen3DecoderLayer(shared) for _ in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context, rows = get_context(), None
        if context.is_prefill:
            rows = context.cu_seqlens_q[1:] - 1
        elif self.decode_attention is not None:
            attention = self.layers[0].self_attn
            num_heads = attention.qkv_proj.num_heads
            self.decode_attention.plan(context, num_heads, attention.attn.k_cache)
        stream = self.embed_tokens(input_ids), None
        *layers, last = self.layers
        for layer in layers:
            stream = layer(positions, stream)
        return self.norm.add_norm(*last(positions, stream, rows))[0]


class Qwen3ForCausalLM(nn.Module):
    """The model as the runner sees it: `forward`, inside one Context, then `compute_logits`."""

    # module here -> {stored module: shard id}
    packed_modules_mapping: ClassVar = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": "gate", "up_proj": "up"},
    }

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionFunction,
        tp: TensorParallel = TensorParallel(),
    ) -> None:
        """Parameters are allocated, not filled, on torch's current default device and dtype.
        Raises ValueError naming both numbers if a part cannot be split over `tp.size` ranks."""
        super().__init__()
        self.tp = tp
        self.model = Qwen3Model(config, attention, tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp)
        self.ignored_tensors: frozenset[str] = frozenset()
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.ignored_tensors = frozenset({"lm_head.weight"})

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T], [T] int -> [N, hidden], of each sequence's last position"""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[N, hidden] -> [N, vocab_size] on rank 0, None elsewhere."""
        return self.lm_head(hidden)
