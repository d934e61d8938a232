"""Layers built for every rank of 2 or 4 in one process, loaded from one source and joined by hand:
together they are the unsplit layer, and each reads no more than its own part."""

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import QWEN3_06B, TQ, WEIGHTS, StoredTensor, make_checkpoint
from safetensors.torch import load_file
from torch import nn

from nanovllm.layers.attention import torch_attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, use_context
from nanovllm.utils.loader import expected_tensors
from nanovllm.utils.parallel import TensorParallel


class ByHand(TensorParallel):
    """A rank whose exchanges are left to the test: it gives its own part of a sum or of a row."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


sizes = pytest.mark.parametrize("size", [2, 4])
SMALL = replace(QWEN3_06B, **TQ)


def ranks(size: int) -> list[ByHand]:
    return [ByHand(rank, size) for rank in range(size)]


def load(param: nn.Parameter, tensor: torch.Tensor, shard_id: Hashable = None) -> list[object]:
    """Load one stored tensor; returns which parts of it were read."""
    source = StoredTensor(tensor)
    param.weight_loader(source, shard_id)
    return source.reads


def test_row_and_column_split_of_the_worked_example() -> None:
    """X = [1,2,3,4], W = [[1,2],[3,4],[5,6],[7,8]]: X W = [50,60], by rows [7,10] + [43,50], by
    columns [50] and [60]. Stored is the transpose of W."""
    x = torch.tensor([[1.0, 2, 3, 4]])
    stored = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]).T.contiguous()
    row_outputs, column_outputs = [], []
    for tp in ranks(2):
        row = RowParallelLinear(4, 2, False, tp, turn=1)
        load(row.weight, stored)
        row_outputs.append(row(x[:, 2 * tp.rank : 2 * tp.rank + 2]).tolist())
        column = MergedColumnParallelLinear(4, {"y": 2}, False, tp)
        load(column.weight, stored, "y")
        column_outputs.append(column(x).tolist())
    assert row_outputs == [[[7, 10]], [[43, 50]]]
    assert column_outputs == [[[50]], [[60]]]


# --- linear layers --------------------------------------------------------------------------------


@sizes
def test_column_parallel_parts_joined_are_the_whole(size: int) -> None:
    """Each fused part is split on its own, with its bias; a rank reads only its rows."""
    widths = {"gate": 8, "up": 16}
    weights = {part: torch.randn(width, 6) for part, width in widths.items()}
    biases = {part: torch.randn(width) for part, width in widths.items()}
    x = torch.randn(3, 6)
    outputs = []
    for tp in ranks(size):
        layer = MergedColumnParallelLinear(6, widths, True, tp)
        for part, width in widths.items():
            own = slice(tp.rank * width // size, (tp.rank + 1) * width // size)
            assert load(layer.weight, weights[part], part) == [own]
            assert load(layer.bias, biases[part], part) == [own]
        outputs.append(layer(x).split([width // size for width in widths.values()], dim=1))
    for i, part in enumerate(widths):
        whole = torch.cat([output[i] for output in outputs], dim=1)
        torch.testing.assert_close(whole, x @ weights[part].T + biases[part])


@sizes
def test_row_parallel_parts_sum_to_the_whole_with_the_bias_once(size: int) -> None:
    """A rank reads only its columns; the bias comes from rank 0 alone."""
    weight, bias, x = torch.randn(5, 12), torch.randn(5), torch.randn(3, 12)
    outputs = []
    for tp in ranks(size):
        layer = RowParallelLinear(12, 5, True, tp, turn=1)
        own = slice(tp.rank * 12 // size, (tp.rank + 1) * 12 // size)
        assert load(layer.weight, weight) == [(slice(None), own)]
        load(layer.bias, bias)
        outputs.append(layer(x[:, own]))
        without_bias = x[:, own] @ weight[:, own].T
        torch.testing.assert_close(outputs[-1], without_bias + bias * (tp.rank == 0))
    torch.testing.assert_close(sum(outputs), x @ weight.T + bias)


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "kv_heads_of"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 2, [[0], [0]]),
        (1, 4, [[0], [0], [0], [0]]),
    ],
)
def test_qkv_is_split_by_heads(num_kv_heads: int, size: int, kv_heads_of: list[list[int]]) -> None:
    """With fewer KV heads than ranks (case 35) a KV head is kept by each rank that holds one of its
    query heads. Eight query heads of head_dim 3; row values name projection and head."""
    head_dim, num_heads = 3, 8

    def stored(base: int, heads: int) -> torch.Tensor:
        return (
            (base + torch.arange(heads).float()).repeat_interleave(head_dim)[:, None].expand(-1, 2)
        )

    for tp in ranks(size):
        layer = QKVParallelLinear(2, head_dim, num_heads, num_kv_heads, False, tp)
        q_heads = list(range(tp.rank * num_heads // size, (tp.rank + 1) * num_heads // size))
        kv_heads = kv_heads_of[tp.rank]
        assert (layer.num_heads, layer.num_kv_heads) == (len(q_heads), len(kv_heads))
        expected: list[int] = []
        for shard_id, base, heads, own in (
            ("q", 100, num_heads, q_heads),
            ("k", 200, num_kv_heads, kv_heads),
            ("v", 300, num_kv_heads, kv_heads),
        ):
            reads = load(layer.weight, stored(base, heads), shard_id)
            assert reads == [slice(own[0] * head_dim, (own[-1] + 1) * head_dim)]
            expected += [base + head for head in own for _ in range(head_dim)]
        assert layer.weight[:, 0].tolist() == layer.weight[:, 1].tolist() == expected


# --- vocabulary -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "size", "rows"), [(515, 2, 258), (515, 4, 129), (512, 4, 128), (5, 4, 2)]
)
def test_vocabulary_of_any_size_is_padded(vocab_size: int, size: int, rows: int) -> None:
    """Case 35: every rank has ceil(vocab / size) rows, the ones past the vocabulary are zero, and
    are never read; a rank may have none but padding (5 tokens over 4 ranks)."""
    stored = torch.randn(vocab_size, 8)
    weights = []
    for tp in ranks(size):
        layer = VocabParallelEmbedding(vocab_size, 8, tp)
        layer.weight.data.fill_(torch.nan)
        first, end = tp.rank * rows, min((tp.rank + 1) * rows, vocab_size)
        assert load(layer.weight, stored) == ([slice(first, end)] if first < end else [])
        assert layer.weight.shape == (rows, 8)
        weights.append(layer.weight)
    joined = torch.cat(weights)
    assert torch.equal(joined[:vocab_size], stored)
    assert not joined[vocab_size:].any()


@pytest.mark.parametrize(("vocab_size", "size"), [(515, 2), (515, 4), (5, 4)])
def test_foreign_tokens_give_zero_and_the_sum_is_the_embedding(vocab_size: int, size: int) -> None:
    """Before the reduce: exactly one rank has a token's row, all others have zeros."""
    stored = torch.rand(vocab_size, 8) + 1
    ids = torch.arange(vocab_size)
    outputs = []
    for tp in ranks(size):
        layer = VocabParallelEmbedding(vocab_size, 8, tp)
        load(layer.weight, stored)
        outputs.append(layer(ids))
    owners = torch.stack([output.any(dim=1) for output in outputs])
    rows_per_rank = -(-vocab_size // size)
    assert torch.equal(owners.int().argmax(0), ids // rows_per_rank)
    assert torch.equal(owners.sum(0), torch.ones_like(ids))
    assert torch.equal(torch.stack(outputs).sum(0), stored)


@pytest.mark.parametrize(("vocab_size", "size"), [(515, 2), (515, 4), (512, 2)])
def test_gathered_logits_are_cut_to_the_vocabulary(vocab_size: int, size: int) -> None:
    """All real logits are negative, so that a zero of the padding would win the argmax."""
    stored, hidden = -torch.rand(vocab_size, 8) - 0.1, torch.rand(3, 8) + 0.1
    parts: list[torch.Tensor] = []

    class Rank0(ByHand):
        def gather(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, *parts], dim=-1)

    for tp in (*ranks(size)[1:], Rank0(0, size)):
        layer = ParallelLMHead(vocab_size, 8, tp)
        load(layer.weight, stored)
        parts.append(layer(hidden))
    logits = parts.pop()
    assert logits.shape == (3, vocab_size) and (logits < 0).all()
    torch.testing.assert_close(logits, hidden @ stored.T)


# --- the whole model ------------------------------------------------------------------------------


def test_what_a_rank_holds_of_qwen3_06b() -> None:
    """The contract's table for two ranks."""
    for rank in range(2):
        with torch.device("meta"):
            model = Qwen3ForCausalLM(QWEN3_06B, torch_attention, TensorParallel(rank, 2))
        layer = model.model.layers[0]
        attn, mlp = layer.self_attn, layer.mlp
        assert model.model.embed_tokens.weight.shape == (75_968, 1024)
        assert model.lm_head.weight.shape == (75_968, 1024)
        assert (attn.qkv_proj.num_heads, attn.qkv_proj.num_kv_heads) == (8, 4)
        assert attn.qkv_proj.weight.shape == (2048, 1024)
        assert attn.o_proj.weight.shape == (1024, 1024)
        assert mlp.gate_up_proj.weight.shape == (2 * 1536, 1024)
        assert mlp.down_proj.weight.shape == (1024, 1536)


def run_in_lockstep(models: list[Qwen3ForCausalLM], ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last three positions of one prompt, which alone leave the last layer, with each
    exchange between the ranks done here. One model is the unsplit case."""
    length, first = len(ids), models[0]
    positions, ends = torch.arange(length), torch.tensor([0, length], dtype=torch.int32)
    context = Context(True, torch.full((length,), -1), ends, ends, length, length)
    bodies = [model.model for model in models]
    stream = sum(body.embed_tokens(ids) for body in bodies), None
    with use_context(context):
        for layers in zip(*(body.layers for body in bodies), strict=True):
            norms = layers[0].input_layernorm, layers[0].post_attention_layernorm
            rows = positions[-3:] if layers[0] is bodies[0].layers[-1] else None
            outs = [layer.self_attn(positions, norms[0], stream, rows) for layer in layers]
            stream = sum(hidden for hidden, _ in outs), outs[0][1]
            outs = [layer.mlp(norms[1], stream) for layer in layers]
            stream = sum(hidden for hidden, _ in outs), outs[0][1]
    hidden, _ = first.model.norm.add_norm(*stream)
    logits = torch.cat([model.lm_head(hidden) for model in models], dim=1)
    return logits[:, : first.lm_head.vocab_size]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@sizes
def test_ranks_in_lockstep_are_the_unsplit_model(
    tmp_path: Path, size: int, num_kv_heads: int
) -> None:
    """Biases and a vocabulary of 515 included. Over all ranks each split tensor is read just once
    (unless its KV head is replicated), and what is not split once by each rank."""
    shape = {"num_key_value_heads": num_kv_heads, "vocab_size": 515, "attention_bias": True}
    folder = make_checkpoint(tmp_path, **shape)
    sources = {name: StoredTensor(x) for name, x in load_file(folder / WEIGHTS).items()}

    def build(tp: TensorParallel) -> Qwen3ForCausalLM:
        model = Qwen3ForCausalLM(replace(SMALL, **shape), torch_attention, tp)
        for param in model.parameters():
            param.data.fill_(torch.nan)
        for name, (loader, shard_id) in expected_tensors(model).items():
            loader(sources[name], shard_id)
        return model

    ids = torch.randint(515, (23,))
    whole = run_in_lockstep([build(TensorParallel())], ids)
    for source in sources.values():
        source.reads.clear()
    split = run_in_lockstep([build(tp) for tp in ranks(size)], ids)
    torch.testing.assert_close(split, whole, atol=1e-4, rtol=0)

    for name, source in sources.items():
        num_read = sum(source.tensor[index].numel() for index in source.reads)
        copies = 1
        if "norm" in name or name.endswith("o_proj.bias"):
            copies = size
        elif "k_proj" in name or "v_proj" in name:
            copies = max(size // num_kv_heads, 1)
        assert num_read == copies * source.tensor.numel(), name


# --- what cannot be split -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "size", "number"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 2, "num_attention_heads (3)"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "num_key_value_heads (3)"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "num_key_value_heads (3)"),
        ({"intermediate_size": 98}, 4, "intermediate_size (98)"),
    ],
)
def test_case_35_what_cannot_be_divided_names_both_numbers(
    changes: dict[str, int], size: int, number: str
) -> None:
    with torch.device("meta"), pytest.raises(ValueError) as raised:
        Qwen3ForCausalLM(replace(SMALL, **changes), torch_attention, TensorParallel(1, size))
    assert number in str(raised.value) and f"tensor_parallel_size={size}" in str(raised.value)


def test_a_shard_of_the_wrong_shape_is_refused_on_every_rank() -> None:
    """The whole stored shape counts, not whether the rank's slice happens to fit."""
    for tp in ranks(2):
        layer = MergedColumnParallelLinear(4, {"y": 8}, False, tp)
        for shape in ((16, 4), (4, 4), (8, 5)):
            with pytest.raises(ValueError, match=r"has shape .* implies \(8, 4\)"):
                load(layer.weight, torch.zeros(shape), "y")
