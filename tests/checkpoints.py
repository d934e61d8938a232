"""Random tiny Qwen3 checkpoints of any shape, and transformers' answers for them.

"TQ" of the tests: 2 layers, hidden 64, 4 heads, 2 KV heads, head_dim 16, vocabulary 512.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ASSETS = Path(__file__).parent / "assets"
TINY_QWEN3 = ASSETS / "tiny-qwen3"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

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


def make_checkpoint(folder: Path, seed: int = 0, max_shard_size: str = "1GB", **shape: Any) -> Path:
    """Write a random float32 Qwen3 of shape TQ, changed by `shape`, with the bundled model's
    tokenizer. Norm weights and biases are random too, so that a forgotten one shows."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**TQ, **shape}))
    for param in model.parameters():
        # Wide enough that logits differ by far more than rounding.
        scale = 0.15 if param.dim() == 2 else 0.3
        param.data.copy_(torch.randn_like(param) * scale + (0 if param.dim() == 2 else 1))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(TINY_QWEN3 / name, folder / name)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    path.write_text(json.dumps(content))


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """transformers' own model of the folder, in eval mode."""
    return Qwen3ForCausalLM.from_pretrained(folder).to(dtype).eval()


@torch.inference_mode()
def reference_logits(model: Qwen3ForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size] in float32."""
    ids = torch.tensor([token_ids], device=model.device)
    return model(ids).logits[0].float()


def reference_greedy(model: Qwen3ForCausalLM, token_ids: list[int], max_tokens: int) -> list[int]:
    """Greedy completion by full recomputation, without EOS: no cache that could share a fault."""
    ids = list(token_ids)
    for _ in range(max_tokens):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[len(token_ids) :]
