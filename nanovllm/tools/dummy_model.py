"""Dummy models: random weights in the shape of a published Qwen3 model, for measurements."""

import json
import shutil
from itertools import accumulate, groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DUMMY_SHAPES = {  # hidden size, layers, heads, intermediate size, tied embeddings
    "qwen3-0.6b": (1024, 28, 16, 3072, True),
    "qwen3-1.7b": (2048, 28, 16, 6144, True),
    "qwen3-4b": (2560, 36, 32, 9728, True),
    "qwen3-8b": (4096, 36, 32, 12288, False),
    "qwen3-14b": (5120, 40, 40, 17408, False),
    "qwen3-32b": (5120, 64, 64, 25600, False),
}
SHARD_BYTES = 5 * 10**9


def dummy_config(name: str) -> dict[str, Any]:
    """config.json of a Qwen3 model."""
    hidden_size, num_layers, num_heads, intermediate_size, tied = DUMMY_SHAPES[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def dummy_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor: those of transformers' own model of this config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**config))
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def write_dummy(folder: Path, config: dict[str, Any], tokenizer: Path) -> None:
    """Write a seeded random bfloat16 checkpoint with the tokenizer of that folder, unless `folder`
    has it already. Raises ValueError if it has something else."""
    index, config_json = folder / "model.safetensors.index.json", json.dumps(config, indent=2)
    if index.is_file() and (folder / "config.json").read_text() == config_json:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is neither empty nor this dummy model: give another folder")
    (folder / "config.json").write_text(config_json)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        weight = torch.ones(shape, dtype=torch.bfloat16, device=device)
        if len(shape) > 1:  # the others are norms
            weight.normal_(std=0.02, generator=generator)
        return weight.cpu()

    tensors, weight_map = dummy_tensors(config), {}
    ends = accumulate(2 * prod(shape) for shape in tensors.values())
    for number, group in groupby(zip(tensors, ends, strict=True), lambda x: x[1] // SHARD_BYTES):
        shard = {name: draw(tensors[name]) for name, _ in group}
        save_file(shard, folder / f"model-{number:05}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{number:05}.safetensors")
    if device == "cuda":
        torch.cuda.empty_cache()  # the engine sizes its pool by what the driver says is free
    # Written last: a folder that has it is complete.
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
