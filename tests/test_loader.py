"""The loader: every parameter filled exactly once from whatever files there are, or an error that
names what is wrong."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import (
    QWEN3_06B,
    WEIGHTS,
    StoredTensor,
    edit_json,
    edit_tensors,
    load_model,
    make_checkpoint,
    write_json,
)
from safetensors.torch import load_file, save_file

from nanovllm.layers.attention import torch_attention
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.hf import load_model_config
from nanovllm.utils.loader import expected_tensors, load_weights

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three checkpoints that no test changes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "untied": make_checkpoint(folder / "untied", attention_bias=True),
        "tied": make_checkpoint(folder / "tied", tie_word_embeddings=True),
        "sharded": make_checkpoint(folder / "sharded", attention_bias=True, max_shard_size="100KB"),
    }


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path) -> Make:
    """Copy one of them, to be changed. The square brackets are special to glob."""
    return lambda name: Path(shutil.copytree(made[name], tmp_path / f"[{name}]"))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def check_filled(model: Qwen3ForCausalLM, stored: dict[str, torch.Tensor]) -> None:
    """Each parameter is exactly the stored tensor, or those that it fuses, in order."""
    fused = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    for name, param in model.named_parameters():
        module = name.split(".")[-2]
        parts = [name.replace(module, part) for part in fused.get(module, (module,))]
        assert torch.equal(param, torch.cat([stored[part] for part in parts])), name


def assert_refused(folder: Path, *words: str) -> None:
    """Loading raises a ValueError that has all the words."""
    with pytest.raises(ValueError) as raised:
        load_model(folder)
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


# --- what loads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["untied", "tied", "sharded"])
def test_every_parameter_is_exactly_what_is_stored(made: dict[str, Path], name: str) -> None:
    """One file or shards with an index; biases; a tied checkpoint, whose lm_head is not stored."""
    assert (made[name] / INDEX).is_file() == (name == "sharded")
    stored = stored_tensors(made[name])
    assert (LM_HEAD in stored) == (name != "tied")
    check_filled(load_model(made[name]), stored)


def test_shards_hold_what_the_single_file_holds(made: dict[str, Path]) -> None:
    assert len(list(made["sharded"].glob("*.safetensors"))) > 3
    single, sharded = load_model(made["untied"]), load_model(made["sharded"])
    for (name, a), (_, b) in zip(
        single.named_parameters(), sharded.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_shards_load_without_an_index_too(copy: Make) -> None:
    folder = copy("sharded")
    (folder / INDEX).unlink()
    check_filled(load_model(folder), stored_tensors(folder))


def test_folder_with_glob_characters_in_its_name(copy: Make) -> None:
    folder = copy("untied")
    assert folder.name == "[untied]"
    check_filled(load_model(folder), stored_tensors(folder))


def test_case_27_index_decides_over_a_stray_file(copy: Make) -> None:
    """A single file with other values, left in a sharded folder, is not looked at; not even if it
    is no safetensors file at all."""
    folder = copy("sharded")
    stored = stored_tensors(folder)
    save_file({name: tensor + 1 for name, tensor in stored.items()}, folder / WEIGHTS)
    (folder / "a.safetensors").write_bytes(b"not one")
    check_filled(load_model(folder), stored)


def test_case_27_index_decides_between_two_copies_of_a_tensor(copy: Make) -> None:
    """A shard may hold a tensor that the index looks for in another shard."""
    folder = copy("sharded")
    stored = stored_tensors(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map[Q_PROJ])
    edit_tensors(folder / other, **{Q_PROJ: stored[Q_PROJ] + 1})
    check_filled(load_model(folder), stored)


def test_case_29_tied_embeddings_are_one_storage(copy: Make) -> None:
    """Without a stored lm_head, and with one: it is ignored even if it has other values."""
    folder = copy("tied")
    for _ in range(2):
        model = load_model(folder)
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        embedding = load_file(folder / WEIGHTS)[EMBEDDING]
        assert torch.equal(model.lm_head.weight, embedding)
        edit_tensors(folder / WEIGHTS, **{LM_HEAD: embedding + 1})


def test_untied_embeddings_are_two_storages(made: dict[str, Path]) -> None:
    model = load_model(made["untied"])
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_stored_dtype_is_converted(copy: Make) -> None:
    """A bfloat16 checkpoint in a float32 model: exactly the rounded values."""
    folder = copy("untied")
    rounded = {name: x.bfloat16() for name, x in stored_tensors(folder).items()}
    save_file(rounded, folder / WEIGHTS)
    model = load_model(folder)
    assert model.lm_head.weight.dtype is torch.float32
    check_filled(model, {name: x.float() for name, x in rounded.items()})


def test_packed_rows_of_qwen3_06b() -> None:
    """q, k and v stand in rows [0,2048), [2048,3072), [3072,4096) of qkv_proj, gate and up in
    [0,3072), [3072,6144) of gate_up_proj, by the names under which the checkpoint stores them."""
    config = replace(QWEN3_06B, num_hidden_layers=1, vocab_size=1)
    model = Qwen3ForCausalLM(config, torch_attention)
    destinations = expected_tensors(model)
    rows = {"q_proj": 2048, "k_proj": 1024, "v_proj": 1024, "gate_proj": 3072, "up_proj": 3072}
    for value, (name, count) in enumerate(rows.items(), start=1):
        block = "self_attn" if count < 3072 else "mlp"
        load, shard_id = destinations[f"model.layers.0.{block}.{name}.weight"]
        load(StoredTensor(torch.full((count, 1024), float(value))), shard_id)
    layer = model.model.layers[0]
    qkv, gate_up = layer.self_attn.qkv_proj.weight, layer.mlp.gate_up_proj.weight
    assert qkv.shape == (4096, 1024) and gate_up.shape == (6144, 1024)
    for start, end, value in ((0, 2048, 1), (2048, 3072, 2), (3072, 4096, 3)):
        assert (qkv[start:end] == value).all()
    assert (gate_up[:3072] == 4).all() and (gate_up[3072:] == 5).all()


# --- what is refused ------------------------------------------------------------------------------


def test_case_29_untied_without_lm_head_names_it(copy: Make) -> None:
    folder = copy("untied")
    edit_tensors(folder / WEIGHTS, **{LM_HEAD: None})
    assert_refused(folder, f"missing {LM_HEAD}", "unexpected none")


@pytest.mark.parametrize(
    "name",
    [
        EMBEDDING,
        Q_PROJ,
        "model.layers.1.self_attn.v_proj.bias",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_missing_tensor_is_named_and_nothing_is_read(copy: Make, name: str) -> None:
    """Also where the other parts of a fused parameter are there."""
    folder = copy("untied")
    edit_tensors(folder / WEIGHTS, **{name: None})
    assert_refused(folder, f"missing {name}", "unexpected none", str(folder))
    model = Qwen3ForCausalLM(load_model_config(str(folder)), torch_attention)
    for param in model.parameters():
        param.data.fill_(7)
    with pytest.raises(ValueError):
        load_weights(model, str(folder))
    assert all((param == 7).all() for param in model.parameters())


def test_extra_tensors_are_named(copy: Make) -> None:
    """E.g. the biases of a checkpoint whose config.json says that there are none."""
    folder = copy("untied")
    edit_json(folder / "config.json", attention_bias=False)
    assert_refused(folder, "missing none", "model.layers.0.self_attn.k_proj.bias")


def test_a_layer_too_many_in_the_config_is_missing(copy: Make) -> None:
    """A long list is cut: 14 tensors with biases."""
    folder = copy("untied")
    edit_json(folder / "config.json", num_hidden_layers=3, layer_types=None)
    assert_refused(folder, "missing model.layers.2.input_layernorm.weight", "and 7 more")


@pytest.mark.parametrize(
    ("name", "shape", "implied"),
    [
        (Q_PROJ, (64, 32), (64, 64)),
        ("model.layers.0.self_attn.k_proj.bias", (64,), (32,)),
        ("model.layers.1.mlp.down_proj.weight", (96, 64), (64, 96)),
        ("model.layers.0.self_attn.q_norm.weight", (64,), (16,)),
        (EMBEDDING, (513, 64), (512, 64)),
        (LM_HEAD, (511, 64), (512, 64)),
    ],
)
def test_a_wrong_shape_is_named_with_the_right_one(
    copy: Make, name: str, shape: tuple[int, ...], implied: tuple[int, ...]
) -> None:
    folder = copy("untied")
    edit_tensors(folder / WEIGHTS, **{name: torch.zeros(shape)})
    assert_refused(folder, WEIGHTS, name, str(shape), str(implied))


@pytest.mark.parametrize("kept", [0, 7, 5000, -1])
def test_a_truncated_file_is_named(copy: Make, kept: int) -> None:
    """Empty, cut in the header's length, in the header or the data: the download broke off."""
    path = copy("untied") / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    assert_refused(path.parent, str(path), "is the download complete?")


def test_no_weights_at_all(copy: Make) -> None:
    folder = copy("untied")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert_refused(folder, str(folder), "no *.safetensors")


def test_a_shard_of_the_index_that_is_not_there(copy: Make) -> None:
    folder = copy("sharded")
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    assert_refused(folder, str(path))


def test_a_tensor_that_only_the_index_knows_is_missing(copy: Make) -> None:
    folder = copy("sharded")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_tensors(folder / weight_map[Q_PROJ], **{Q_PROJ: None})
    assert_refused(folder, f"missing {Q_PROJ}")


@pytest.mark.parametrize("content", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}, []])
def test_an_index_of_another_form(copy: Make, content: object) -> None:
    folder = copy("sharded")
    write_json(folder / INDEX, content)
    assert_refused(folder, INDEX, "cannot be read")


def test_an_index_that_is_no_json(copy: Make) -> None:
    folder = copy("sharded")
    (folder / INDEX).write_text("{")
    assert_refused(folder, INDEX, "cannot be read")


def test_a_tensor_in_two_files_without_an_index(copy: Make) -> None:
    """Which of them would win is not for the file system's order to say."""
    folder = copy("untied")
    save_file({Q_PROJ: load_file(folder / WEIGHTS)[Q_PROJ]}, folder / "extra.safetensors")
    assert_refused(folder, Q_PROJ, "extra.safetensors", WEIGHTS)
