"""Config: every setting of an engine, validated once and then frozen. Imports no torch."""

import difflib
import math
import os
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.utils.checks import check_bool, check_number, keep_int

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cuda", "cpu")
INT32 = 2**31 - 1  # what rows and block ids are stored in


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the user asked for. What start-up finds out (device, KV blocks) is kept elsewhere.

    model: folder in Hugging Face format (config.json, *.safetensors, tokenizer).
    max_num_batched_tokens: positions computed in one prefill step, >= 1.
    max_num_seqs: sequences in one step, >= 1.
    max_model_len: prompt + completion of one request, >= 2; cut to the model's own
        `max_position_embeddings` at start.
    gpu_memory_utilization: share of the GPU's memory for everything, in (0, 1].
    tensor_parallel_size: GPUs that share the model, 1 to 8.
    enforce_eager: never use CUDA graphs.
    kvcache_block_size: positions in one KV block, >= 1; FlashAttention needs a multiple of 256.
    num_kvcache_blocks: None sizes the pool from memory (1 GiB on CPU); a number is obeyed, and a
        request that could outgrow such a pool is refused when it is added.
    device: "auto" takes cuda where there is one.
    dtype: "auto" is the checkpoint's on cuda and float32 on cpu.

    Raises TypeError for an unknown name or a wrong type, ValueError for a value out of bounds.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int | None = None
    device: str = "auto"
    dtype: str = "auto"

    @classmethod
    def from_settings(cls, model: str | os.PathLike[str], settings: dict[str, Any]) -> "Config":
        """Build from `LLM`'s keyword arguments; an unknown one is a TypeError that names the
        nearest valid one, so that a typo never silently runs with a default."""
        valid = [field.name for field in fields(cls)]
        for name in settings:
            if name not in valid:
                near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
                if name == "tp":  # as the scripts call it
                    near = ["tensor_parallel_size"]
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise TypeError(
                    f"unknown setting {name!r}: {hint}valid settings are " + ", ".join(valid)
                )
        if isinstance(model, (str, os.PathLike)):
            model = os.path.expanduser(os.fspath(model))
        return cls(model=model, **settings)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise TypeError(f"model must be the path of a folder, got {self.model!r}")
        if not os.path.isdir(self.model):
            raise ValueError(
                f"model folder {self.model!r} does not exist, or is a file; give a local folder in "
                "Hugging Face format (nothing is downloaded)"
            )
        keep_int(self, "max_num_batched_tokens", 1)
        keep_int(self, "max_num_seqs", 1, INT32)
        keep_int(self, "max_model_len", 2)
        keep_int(self, "tensor_parallel_size", 1, 8)
        keep_int(self, "kvcache_block_size", 1, INT32)
        if self.num_kvcache_blocks is not None:
            keep_int(self, "num_kvcache_blocks", 1, INT32)
        utilization = self.gpu_memory_utilization
        check_number("gpu_memory_utilization", utilization, "in (0, 1]", math.ulp(0.0), 1)
        check_bool("enforce_eager", self.enforce_eager)
        for name, allowed in (("device", DEVICES), ("dtype", DTYPES)):
            value = getattr(self, name)
            if value not in allowed:
                error = ValueError if isinstance(value, str) else TypeError
                raise error(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
