"""Config: every setting of an engine, validated once and then frozen. Imports no torch."""

import difflib
import os
from dataclasses import dataclass, fields
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cuda", "cpu")


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
                near = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
                raise TypeError(
                    f"unknown setting {name!r}: did you mean {near[0]!r}? Valid settings: "
                    + ", ".join(valid)
                )
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(f"model must be the path of a folder, got {model!r}")
        return cls(model=os.fspath(model), **settings)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise TypeError(f"model must be the path of a folder, got {self.model!r}")
        if not os.path.isdir(self.model):
            raise ValueError(
                f"model folder {self.model!r} does not exist; give a local folder in Hugging Face "
                "format (nothing is downloaded)"
            )
        self._check_int("max_num_batched_tokens", 1)
        self._check_int("max_num_seqs", 1)
        self._check_int("max_model_len", 2)
        self._check_int("tensor_parallel_size", 1, 8)
        self._check_int("kvcache_block_size", 1)
        if self.num_kvcache_blocks is not None:
            self._check_int("num_kvcache_blocks", 1)
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, (int, float)):
            raise TypeError(f"gpu_memory_utilization must be a number, got {utilization!r}")
        if not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {utilization!r}")
        if not isinstance(self.enforce_eager, bool):
            raise TypeError(f"enforce_eager must be True or False, got {self.enforce_eager!r}")
        for name, allowed in (("device", DEVICES), ("dtype", DTYPES)):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")

    def _check_int(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        bounds = f">= {low}" if high is None else f"in {low}..{high}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int {bounds}, got {value!r}")
        if value < low or (high is not None and value > high):
            raise ValueError(f"{name} must be {bounds}, got {value!r}")
