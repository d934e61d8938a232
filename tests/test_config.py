"""Config: every setting's default and bounds, and that a typo never runs with a default."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from nanovllm.config import Config


def make(folder: Path, **settings: Any) -> Config:
    return Config.from_settings(folder, settings)


def test_defaults(tmp_path: Path) -> None:
    assert dataclasses.asdict(make(tmp_path)) == {
        "model": str(tmp_path),
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 512,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "kvcache_block_size": 256,
        "num_kvcache_blocks": None,
        "device": "auto",
        "dtype": "auto",
    }


def test_the_settings_that_articles_use_are_taken(tmp_path: Path) -> None:
    settings = {
        "enforce_eager": True,
        "tensor_parallel_size": 1,
        "max_model_len": 1024,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 512,
        "kvcache_block_size": 256,
        "gpu_memory_utilization": 0.5,
    }
    config = make(tmp_path, **settings)
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_batched_tokens", 1),
        ("max_num_seqs", 1),
        ("max_model_len", 2),  # one prompt token, one completion token
        ("gpu_memory_utilization", 1e-9),
        ("gpu_memory_utilization", 1),
        ("gpu_memory_utilization", 1.0),
        ("tensor_parallel_size", 1),
        ("tensor_parallel_size", 8),
        ("kvcache_block_size", 1),
        ("num_kvcache_blocks", 1),
        ("num_kvcache_blocks", None),
        *[("device", device) for device in ("auto", "cuda", "cpu")],
        *[("dtype", dtype) for dtype in ("auto", "float32", "bfloat16", "float16")],
    ],
)
def test_bounds_are_inside(tmp_path: Path, name: str, value: Any) -> None:
    assert getattr(make(tmp_path, **{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", -1),
        ("max_model_len", 1),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", -0.5),
        ("gpu_memory_utilization", 1.0001),
        ("gpu_memory_utilization", math.nan),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", 9),
        ("kvcache_block_size", 0),
        ("num_kvcache_blocks", 0),
        ("num_kvcache_blocks", 2**31),
        ("kvcache_block_size", 2**31),
        ("max_num_seqs", 2**31),
        ("device", "tpu"),
        ("dtype", "float64"),
    ],
)
def test_out_of_bounds_is_a_value_error_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        make(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_batched_tokens", 1.0),
        ("max_num_seqs", True),
        ("max_model_len", "1024"),
        ("max_model_len", None),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", True),
        ("tensor_parallel_size", 2.0),
        ("enforce_eager", 1),
        ("kvcache_block_size", 256.0),
        ("num_kvcache_blocks", 10.0),
    ],
)
def test_wrong_type_is_a_type_error_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        make(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("max_batched_tokens", "max_num_batched_tokens"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("eager", "enforce_eager"),
        ("kv_cache_block_size", "kvcache_block_size"),
        ("gpu_mem_utilization", "gpu_memory_utilization"),
        ("tp", "tensor_parallel_size"),
    ],
)
def test_case_39_unknown_setting_names_the_nearest_one(
    tmp_path: Path, typo: str, nearest: str
) -> None:
    with pytest.raises(TypeError, match=f"{typo!r}: did you mean {nearest!r}"):
        make(tmp_path, **{typo: 1})


def test_a_setting_that_is_like_no_other_gets_no_suggestion(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'trust_remote_code': valid settings are model, max"):
        make(tmp_path, trust_remote_code=True)


def test_frozen(tmp_path: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make(tmp_path).max_num_seqs = 3


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no-such-model"):
        make(tmp_path / "no-such-model")


def test_a_file_is_not_a_model_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ValueError, match="folder"):
        make(path)


@pytest.mark.parametrize("model", [None, 3, b"model"])
def test_model_must_be_a_path(model: Any) -> None:
    with pytest.raises(TypeError, match="model"):
        Config.from_settings(model, {})
