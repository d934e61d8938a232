"""Folders that no careful tool wrote: whatever is in the files, a start ends with an engine or with
a ValueError or TypeError that names the place, in bounded time and memory."""

import gc
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from checkpoints import (
    TQ,
    WEIGHTS,
    edit_json,
    edit_tensors,
    make_checkpoint,
    write_config,
    write_json,
)
from hypothesis import given, settings
from safetensors.torch import load_file

from nanovllm import LLM
from nanovllm.utils.loader import STORED_DTYPES

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"

some = settings(max_examples=60, deadline=None, derandomize=True)


class Folder:
    """A checkpoint whose files examples may overwrite; `restore` undoes that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_checkpoint(path)
        write_config(path)
        self.files = {file.name: file.read_bytes() for file in path.iterdir()}
        self.weights = self.files[WEIGHTS]
        self.header_size = struct.unpack("<Q", self.weights[:8])[0]
        self.header = json.loads(self.weights[8 : 8 + self.header_size])

    def restore(self) -> None:
        for file in self.path.iterdir():
            if file.name not in self.files:
                file.unlink()
        for name, content in self.files.items():
            (self.path / name).write_bytes(content)

    def write_header(self, header: object, size: int | None = None) -> None:
        """Replace the header of the weights; `size`: what is said to be its length."""
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        data = self.weights[8 + self.header_size :]
        size = len(text) if size is None else size
        (self.path / WEIGHTS).write_bytes(struct.pack("<Q", size) + text + data)

    def outcome(self) -> str | None:
        """None if an engine starts, else the error's message, which must be a clear one."""
        try:
            LLM(self.path, device="cpu", num_kvcache_blocks=2).exit()
        except (ValueError, TypeError) as error:
            message = str(error)
            assert str(self.path) in message and len(message) > len(str(self.path)) + 15, message
            return message
        return None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Engines that do start end with a collection, which takes longer than all the rest.
        monkeypatch.setattr(gc, "collect", lambda: 0)
        yield Folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(made: Folder) -> Iterator[Folder]:
    yield made
    made.restore()


# --- config.json ----------------------------------------------------------------------------------

SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.integers(),
    st.sampled_from([2**31, 2**63, 10**18, -(2**40), 10**30]),
    st.floats(),
    st.text(max_size=8),
)
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
)
KEYS = [
    *TQ,
    *("model_type", "architectures", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("rope_parameters", "dtype", "torch_dtype", "layer_types", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "eos_token_id", "quantization_config"),
]


@some
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_random_values_in_config_json(made: Folder, changes: dict[str, Any]) -> None:
    write_config(made.path, **changes)
    made.outcome()
    made.restore()


@pytest.mark.parametrize("name", [n for n in TQ if n not in ("tie_word_embeddings",)])
@pytest.mark.parametrize("value", [10**5, 2**31 - 1, 2**40, 10**30, 1e300])
def test_absurd_sizes_are_refused_before_they_are_memory(
    folder: Folder, name: str, value: float
) -> None:
    """One number of config.json out of all proportion to the files: nothing of that size is made,
    neither tensors nor lists of layers. Positions need no weights: any number of them is fine."""
    write_config(folder.path, **{name: value})
    outcome = folder.outcome()
    fine = name == "max_position_embeddings" and value < 2**31
    assert (outcome is None) == fine
    if not fine:
        assert "config.json" in outcome


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": "false"}, "attention_bias"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": 1e-300}, "rope_theta"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"max_position_embeddings": 1}, "max_position_embeddings must be an int >= 2"),
    ],
)
def test_values_that_would_be_read_wrongly(
    folder: Folder, changes: dict[str, Any], words: str
) -> None:
    """bool("false") is True, and the rest would be ignored, or fail in the first step."""
    write_config(folder.path, **changes)
    assert words in folder.outcome()


@some
@given(content=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_files_of_random_bytes_or_json(made: Folder, name: str, content: bytes) -> None:
    (made.path / name).write_bytes(content)
    outcome = made.outcome()
    if name != "generation_config.json":
        assert outcome is not None and name in outcome
    made.restore()


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", INDEX, "tokenizer_config.json"]
)
def test_json_that_is_deeper_than_the_stack(folder: Folder, name: str) -> None:
    (folder.path / name).write_text("[" * 200_000)
    assert folder.outcome() is not None


@some
@given(kept=st.floats(0, 1))
def test_truncated_tokenizer(made: Folder, kept: float) -> None:
    content = made.files["tokenizer.json"]
    (made.path / "tokenizer.json").write_bytes(content[: int(kept * len(content))])
    assert kept == 1 or "cannot read the tokenizer" in made.outcome()
    made.restore()


@some
@given(eos=JSON)
def test_random_eos_ids(made: Folder, eos: Any) -> None:
    """Ints, also ones that no model emits, or a list of them, or none; else an error."""
    write_json(made.path / "generation_config.json", {"eos_token_id": eos})
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    good = all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    assert (made.outcome() is None) == good
    made.restore()


# --- safetensors ----------------------------------------------------------------------------------


@some
@given(kept=st.floats(0, 1, exclude_max=True))
def test_weights_truncated_anywhere(made: Folder, kept: float) -> None:
    (made.path / WEIGHTS).write_bytes(made.weights[: int(kept * len(made.weights))])
    assert "is the download complete?" in made.outcome()
    made.restore()


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
def test_absurd_header_length(folder: Folder, size: int) -> None:
    """Nothing of that length is read or allocated."""
    folder.write_header(folder.header, size)
    assert "cannot be read" in folder.outcome()


@some
@given(where=st.floats(0, 1, exclude_max=True), replacement=st.binary(min_size=1, max_size=4))
def test_random_bytes_in_the_header(made: Folder, where: float, replacement: bytes) -> None:
    """Names, dtypes, shapes or offsets changed: refused, or harmless, as in a space."""
    content = bytearray(made.weights)
    start = int(where * (8 + made.header_size))
    content[start : start + len(replacement)] = replacement
    (made.path / WEIGHTS).write_bytes(content)
    made.outcome()
    made.restore()


@some
@given(data=st.data())
def test_random_values_in_the_header(made: Folder, data: st.DataObject) -> None:
    """A well-formed header that says something else about one tensor."""
    header = json.loads(json.dumps(made.header))
    name = data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    value = data.draw(JSON | st.lists(st.integers(0, 5000), max_size=3))
    same = header[name][key] == value
    header[name][key] = value
    made.write_header(header)
    assert (made.outcome() is None) == same
    made.restore()


NOT_SERVED = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float64]
NOT_SERVED += [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NOT_SERVED)
def test_weights_of_another_dtype(folder: Folder, dtype: torch.dtype) -> None:
    """Quantized weights without their scales would load as nonsense."""
    stored = load_file(folder.path / WEIGHTS)[Q_PROJ]
    edit_tensors(folder.path / WEIGHTS, **{Q_PROJ: stored.to(dtype)})
    outcome = folder.outcome()
    assert Q_PROJ in outcome and "is not one of F32, BF16, F16" in outcome


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_the_dtypes_that_are_served(folder: Folder, dtype: torch.dtype) -> None:
    assert len(STORED_DTYPES) == 3
    stored = load_file(folder.path / WEIGHTS)
    edit_tensors(folder.path / WEIGHTS, **{name: x.to(dtype) for name, x in stored.items()})
    assert folder.outcome() is None


def test_config_of_a_larger_model_beside_the_weights_of_a_small_one(folder: Folder) -> None:
    """The first tensor that does not match is named, with both shapes."""
    edit_json(folder.path / "config.json", hidden_size=4096, intermediate_size=16384)
    outcome = folder.outcome()
    assert "has shape (512, 64), but config.json implies (512, 4096)" in outcome
