"""Tiny Qwen3 checkpoints of any shape, this engine's logits for them, and transformers' answers.

"TQ" of the tests: 2 layers, hidden 64, 4 heads, 2 KV heads, head_dim 16, vocabulary 512.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

from nanovllm.layers.attention import torch_attention
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, use_context
from nanovllm.utils.hf import ModelConfig, load_model_config
from nanovllm.utils.loader import load_weights

ASSETS = Path(__file__).parent / "assets"
TINY_QWEN3 = ASSETS / "tiny-qwen3"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
WEIGHTS = "model.safetensors"

TQ = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

QWEN3_06B = ModelConfig(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    attention_bias=False,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


# --- files ----------------------------------------------------------------------------------------


def make_checkpoint(
    folder: Path,
    seed: int = 0,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> Path:
    """Write a random Qwen3 of shape TQ, changed by `shape`, with the bundled model's tokenizer.
    Norm weights and biases are random too, so that a forgotten one shows. Returns `folder`."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**TQ, **shape}))
    for param in model.parameters():
        # Wide enough that logits differ by far more than rounding.
        scale, offset = (0.15, 0) if param.dim() == 2 else (0.3, 1)
        param.data.copy_(torch.randn(param.shape, generator=generator) * scale + offset)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Give `folder` the bundled model's tokenizer (2,048 ids: prompt a smaller model with ids)."""
    for name in TOKENIZER_FILES:
        shutil.copy(TINY_QWEN3 / name, folder / name)


def write_config(folder: Path, **changes: Any) -> None:
    """Write config.json for TQ by hand, with neither RoPE base nor dtype: what `save_pretrained`
    writes differs between transformers versions. A value of None leaves the key out."""
    content = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
    content |= {"rms_norm_eps": 1e-6, **TQ, **changes}
    write_json(folder / "config.json", {k: v for k, v in content.items() if v is not None})


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text()) | changes
    write_json(path, {key: value for key, value in content.items() if value is not None})


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Set tensors of a safetensors file; None removes the tensor."""
    content = load_file(path) | changes
    save_file({k: v for k, v in content.items() if v is not None}, path, {"format": "pt"})


def emit_always(folder: Path, token_id: int) -> None:
    """Change an untied single-file checkpoint so that its argmax is always `token_id`: branches
    add nothing, all embeddings are ones, and so is this one row of the LM head."""
    stored = load_file(folder / WEIGHTS)
    zeroed = ("o_proj.weight", "down_proj.weight", "lm_head.weight")
    changes = {name: torch.zeros_like(stored[name]) for name in stored if name.endswith(zeroed)}
    changes["lm_head.weight"][token_id] = 1
    changes["model.embed_tokens.weight"] = torch.ones_like(stored["model.embed_tokens.weight"])
    edit_tensors(folder / WEIGHTS, **changes)


class StoredTensor:
    """A tensor as the loader meets it in a file: nothing is read until it is indexed. `reads` keeps
    each index, so that a test can see that a rank reads only its own slice."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.reads: list[Any] = []

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.reads.append(index)
        return self.tensor[index]


# --- this engine ----------------------------------------------------------------------------------


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """This engine's model of the folder in float32 on the CPU, without a KV pool. What the loader
    leaves out is NaN."""
    model = Qwen3ForCausalLM(load_model_config(str(folder)), torch_attention)
    for param in model.parameters():
        param.data.fill_(torch.nan)
    load_weights(model, str(folder))
    return model


@torch.inference_mode()
def engine_logits(model: Qwen3ForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size]: every position of one prompt, from one prefill."""
    length = len(token_ids)
    ends = torch.tensor([0, length], dtype=torch.int32)
    nowhere = torch.full((length,), -1, dtype=torch.int32)
    prefill = Context(True, nowhere, ends, ends, max_seqlen_q=length, max_seqlen_k=length)
    stream = model.model.embed_tokens(torch.tensor(token_ids)), None
    with use_context(prefill):
        for layer in model.model.layers:  # as the model's, whose last one drops all but one row
            stream = layer(torch.arange(length), stream)
        last = model.compute_logits(model(torch.tensor(token_ids), torch.arange(length)))
    logits = model.compute_logits(model.model.norm.add_norm(*stream)[0])
    torch.testing.assert_close(last, logits[-1:])
    return logits


# --- transformers ---------------------------------------------------------------------------------


def reference_model(
    folder: Path, dtype: torch.dtype = torch.float32
) -> transformers.Qwen3ForCausalLM:
    """transformers' own model of the folder, in eval mode."""
    return transformers.Qwen3ForCausalLM.from_pretrained(folder).to(dtype).eval()


@torch.inference_mode()
def reference_logits(model: transformers.Qwen3ForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size] in float32."""
    ids = torch.tensor([token_ids], device=model.device)
    return model(ids).logits[0].float()


def reference_greedy(
    model: transformers.Qwen3ForCausalLM, token_ids: list[int], max_tokens: int
) -> list[int]:
    """Greedy completion by full recomputation, without EOS: no cache that could share a fault."""
    ids = list(token_ids)
    for _ in range(max_tokens):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[len(token_ids) :]


# --- comparison -----------------------------------------------------------------------------------


class LogitErrors(NamedTuple):
    """How far one path's logits are from the reference's."""

    max_abs: float
    relative_l2: float
    top1_agreement: float  # share of positions with the same argmax


def logit_errors(logits: torch.Tensor, reference: torch.Tensor) -> LogitErrors:
    """Both [N, vocab_size]."""
    assert logits.shape == reference.shape
    difference = logits.float() - reference.float()
    return LogitErrors(
        max_abs=difference.abs().max().item(),
        relative_l2=(difference.norm() / reference.float().norm()).item(),
        top1_agreement=(logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
    )


def random_ids(count: int, vocab_size: int = TQ["vocab_size"], seed: int = 0) -> list[int]:
    """A prompt of `count` token ids below `vocab_size`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
