"""What is read from a Hugging Face folder besides weights: model shape, EOS ids, tokenizer.

All guessing about file layouts of different transformers versions happens here.
"""

import glob
import json
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from nanovllm.config import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Qwen3 model, in Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint: "float32", "bfloat16" or "float16"


SIZES = tuple(field.name for field in fields(ModelConfig) if field.type is int)


def load_model_config(folder: str) -> ModelConfig:
    """Read config.json. Raises ValueError for a missing or unreadable file, another architecture,
    or a feature that this engine would otherwise silently ignore."""
    content = _read_json(folder, "config.json")
    model_type = content.get("model_type")
    if model_type != "qwen3":
        raise ValueError(
            f"{folder}: config.json says model_type {model_type!r}; only 'qwen3' is supported"
        )
    for name in SIZES:  # before transformers makes lists of such lengths
        value, most = content.get(name), 10_000 if name == "num_hidden_layers" else 2**31
        if isinstance(value, (int, float)) and value > most:
            raise ValueError(f"{folder}: config.json: {name} must be at most {most}, got {value!r}")
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds, all about this one file
        raise ValueError(f"{folder}: transformers cannot read config.json: {error}") from error
    _check_values(folder, hf)
    # 4.x calls it torch_dtype, 5.x dtype and gives a torch.dtype or a string.
    dtype = getattr(hf, "dtype", None) or getattr(hf, "torch_dtype", None) or _stored_dtype(folder)
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES[1:]:
        raise ValueError(f"{folder}: dtype {dtype!r} is not one of {', '.join(DTYPES[1:])}")
    return ModelConfig(
        **{name: getattr(hf, name) for name in SIZES},
        rms_norm_eps=float(hf.rms_norm_eps),
        rope_theta=_rope_theta(folder, hf),
        attention_bias=bool(hf.attention_bias),
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        dtype=dtype,
    )


def _stored_dtype(folder: str) -> str:
    """For a config.json that names no dtype: that of the first stored tensor. Files that cannot be
    read are left for the loader to name."""
    from safetensors import SafetensorError, safe_open

    names = {"BF16": "bfloat16", "F16": "float16"}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safe_open is not iterable)
                    return names.get(file.get_slice(name).get_dtype(), "float32")
        except (OSError, SafetensorError):
            continue
    return "float32"


def _check_values(folder: str, hf: Any) -> None:
    """Raise ValueError for a value that no Qwen3 model can have, which 4.x takes from the file as
    it is, and for what this engine does not do."""
    for name in SIZES:
        value, least = getattr(hf, name), 2 if name == "max_position_embeddings" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{folder}: config.json: {name} must be an int >= {least}, got {value!r}"
            )
    for name in ("attention_bias", "tie_word_embeddings", "use_sliding_window"):
        value = getattr(hf, name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{folder}: config.json: {name} must be true or false, got {value!r}")
    layer_types = getattr(hf, "layer_types", None)
    others = isinstance(layer_types, list) and any(t != "full_attention" for t in layer_types)
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    for is_wrong, reason in (
        (not _is_positive(hf.rms_norm_eps), f"rms_norm_eps {hf.rms_norm_eps!r} is not > 0"),
        (
            heads % kv_heads,
            f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})",
        ),
        (hf.head_dim % 2, f"head_dim ({hf.head_dim}) must be even for rotary embedding"),
        (hf.hidden_act != "silu", f"hidden_act {hf.hidden_act!r} is not 'silu'"),
        (hf.use_sliding_window or others, "use_sliding_window, or layer_types for it"),
        (getattr(hf, "quantization_config", None), "quantization_config"),
    ):
        if is_wrong:
            raise ValueError(f"{folder}: config.json: not supported: {reason}")


def _is_positive(value: Any) -> bool:
    """A number that a float32 can hold, and be divided by."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 1e-37 < value < 1e38


def _rope_theta(folder: str, hf: Any) -> float:
    """The base of the rotary angles. 5.x nests it in `rope_parameters`, some files in
    `rope_scaling`; 4.x then fills the top level with a default that means nothing."""
    theta = getattr(hf, "rope_theta", None)
    for name in ("rope_scaling", "rope_parameters"):
        nested = getattr(hf, name, None) or {}
        if not isinstance(nested, dict) or any(isinstance(v, dict) for v in nested.values()):
            raise ValueError(f"{folder}: config.json: {name} {nested!r} is not supported")
        rope_type = nested.get("rope_type") or nested.get("type") or "default"
        if rope_type != "default":
            raise ValueError(f"{folder}: RoPE type {rope_type!r} is not supported, only 'default'")
        theta = nested.get("rope_theta") or theta
    if not _is_positive(theta):
        raise ValueError(
            f"{folder}: config.json: rope_theta must be a number > 0 in float32, got {theta!r}"
        )
    return float(theta)


def load_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """The folder's fast tokenizer. Raises ValueError if there is none or it cannot be read."""
    from transformers import AutoTokenizer

    if not os.path.isfile(os.path.join(folder, "tokenizer.json")) and not os.path.isfile(
        os.path.join(folder, "vocab.json")
    ):
        raise ValueError(
            f"{folder}: no tokenizer.json (or vocab.json and merges.txt): copy the tokenizer files "
            "of the model into the folder"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise ValueError(f"{folder}: transformers cannot read the tokenizer: {error}") from error


def load_eos_token_ids(folder: str, tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Ids that end a completion: generation_config.json's (one or a list) where it names any, and
    the tokenizer's own."""
    ids: Any = None
    if os.path.isfile(os.path.join(folder, "generation_config.json")):
        ids = _read_json(folder, "generation_config.json").get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"{folder}: generation_config.json: eos_token_id must be ints, got {ids}")
    own = tokenizer.eos_token_id
    return frozenset(ids) | (frozenset() if own is None else {own})


def _read_json(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: no {name}; is it a model folder in Hugging Face format?"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content
