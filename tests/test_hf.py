"""Reading a Hugging Face folder: config.json in every form that transformers 4.51 to 5.x know, EOS
ids and the tokenizer. The JSON is written by hand, since transformers' own differs by version."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import (
    QWEN3_06B,
    copy_tokenizer,
    edit_json,
    emit_always,
    make_checkpoint,
    write_config,
    write_json,
)

from nanovllm import LLM, SamplingParams
from nanovllm.utils.hf import (
    SIZES,
    ModelConfig,
    load_eos_token_ids,
    load_model_config,
    load_tokenizer,
)

DEFAULT = {"rope_type": "default"}
# name -> where a RoPE base may stand
ROPE_PLACES = {
    "top": lambda theta: {"rope_theta": theta},
    "rope_parameters": lambda theta: {"rope_parameters": {"rope_theta": theta, **DEFAULT}},
    "rope_scaling": lambda theta: {"rope_scaling": {"rope_theta": theta, **DEFAULT}},
    "top and typed rope_scaling": lambda theta: {"rope_theta": theta, "rope_scaling": DEFAULT},
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """load_model_config of a hand-written config.json."""
    write_config(folder, **changes)
    return load_model_config(str(folder))


# --- config.json: what is read --------------------------------------------------------------------


def test_every_field_is_the_files(tmp_path: Path) -> None:
    """All of them unlike transformers' defaults."""
    config = read(
        tmp_path,
        rope_theta=12345,
        rms_norm_eps=1e-5,
        attention_bias=True,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )
    assert config == ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=12345.0,
        attention_bias=True,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def test_absent_keys_take_the_defaults_of_qwen3(tmp_path: Path) -> None:
    """head_dim 128 (not hidden / heads), untied, no biases, RoPE base 10,000, float32."""
    absent = ("head_dim", "tie_word_embeddings", "attention_bias", "rms_norm_eps", "hidden_act")
    config = read(tmp_path, **dict.fromkeys(absent))
    assert config.head_dim == 128
    assert config.tie_word_embeddings is False and config.attention_bias is False
    assert config.rms_norm_eps == 1e-6
    assert config.rope_theta == 10_000
    assert config.dtype == "float32"


def test_the_published_config_of_qwen3_06b(tmp_path: Path) -> None:
    """With all its keys, nulls included, in the form that 4.51 wrote."""
    content = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    write_json(tmp_path / "config.json", content)
    assert load_model_config(str(tmp_path)) == QWEN3_06B


@pytest.mark.parametrize("theta", [1e6, 12345])
@pytest.mark.parametrize("place", ROPE_PLACES)
def test_case_30_rope_theta_in_each_place(tmp_path: Path, place: str, theta: float) -> None:
    assert read(tmp_path, **ROPE_PLACES[place](theta)).rope_theta == theta


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_case_30_nested_rope_theta_wins(tmp_path: Path, place: str) -> None:
    """As in transformers 5; 4.x fills the top level with a default that means nothing."""
    assert read(tmp_path, rope_theta=1e6, **ROPE_PLACES[place](12345)).rope_theta == 12345


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_case_30_dtype_under_either_name(tmp_path: Path, key: str, dtype: str) -> None:
    assert read(tmp_path, **{key: dtype}).dtype == dtype


# --- config.json: what is refused -----------------------------------------------------------------


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
def test_unsupported_rope_types(tmp_path: Path, place: str, rope_type: str, key: str) -> None:
    """Ignored, they would give fluent-looking wrong text."""
    rope = {key: rope_type, "factor": 4.0, "rope_theta": 1e6}
    if rope_type == "yarn":
        rope["original_max_position_embeddings"] = 128
    with pytest.raises(ValueError, match=f"RoPE type '{rope_type}' is not supported"):
        read(tmp_path, **{place: rope})


def test_rope_parameters_for_each_layer_type_are_refused(tmp_path: Path) -> None:
    """4.x would read past them, and take its default base of 10,000."""
    nested = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}
    with pytest.raises(ValueError, match=r"rope"):
        read(tmp_path, rope_parameters=nested)


def test_an_unknown_rope_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="spiral"):
        read(tmp_path, rope_scaling={"rope_type": "spiral"})


def test_sliding_window_is_refused_where_it_is_used(tmp_path: Path) -> None:
    """Qwen3 files name a sliding_window that is switched off: those are fine."""
    read(tmp_path, sliding_window=64, max_window_layers=1, use_sliding_window=False)
    with pytest.raises(ValueError, match="use_sliding_window"):
        read(tmp_path, sliding_window=64, max_window_layers=1, use_sliding_window=True)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe", "llama", "no-such-model", None])
def test_other_model_types(tmp_path: Path, model_type: str | None) -> None:
    with pytest.raises(ValueError, match=f"model_type {model_type!r}; only 'qwen3'"):
        read(tmp_path, model_type=model_type)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, ["(4)", "(3)"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"hidden_act": "gelu"}, ["'gelu'"]),
        *(({name: value}, [name]) for name in SIZES for value in (0, -2, 2.5, "64", True)),
        *(({"rope_theta": value}, ["rope_theta"]) for value in (0, -1e6, float("nan"), "1e6")),
        ({"rope_parameters": [1]}, ["rope_parameters", "[1]"]),
        ({"rope_scaling": "default"}, ["config.json"]),
        ({"torch_dtype": "float64"}, ["'float64'"]),
        ({"dtype": "int8"}, ["int8"]),
    ],
)
def test_impossible_values(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        read(tmp_path, **changes)
    for word in (str(tmp_path), *words):
        assert word in str(raised.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '"qwen3"', "\x80"])
def test_config_that_is_no_json_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model_config(str(tmp_path))


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json; is it a model folder"):
        load_model_config(str(tmp_path))


# --- tokenizer ------------------------------------------------------------------------------------


def test_tokenizer_of_the_bundled_model(tiny_qwen3: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_qwen3))
    text = "ROMEO:\nIt is the east, and Juliet is the sun."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"


def test_missing_tokenizer(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*copy the tokenizer files"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{}", "{"])
def test_unreadable_tokenizer(tmp_path: Path, content: str) -> None:
    write_config(tmp_path)
    copy_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        load_tokenizer(str(tmp_path))


# --- EOS ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation_config", "own", "expected"),
    [
        ({"eos_token_id": [5, 9]}, 9, {5, 9}),
        ({"eos_token_id": 5}, 9, {5, 9}),
        ({"eos_token_id": 0}, None, {0}),
        ({"eos_token_id": []}, 9, {9}),
        ({"eos_token_id": None}, 9, {9}),
        ({}, 9, {9}),
        ({}, None, set()),
        (None, 9, {9}),
        (None, None, set()),
    ],
)
def test_eos_ids(
    tmp_path: Path, generation_config: dict[str, Any] | None, own: int | None, expected: set[int]
) -> None:
    """generation_config.json (one id, a list, none, no file) and the tokenizer's own id."""
    if generation_config is not None:
        write_json(tmp_path / "generation_config.json", generation_config)
    assert load_eos_token_ids(str(tmp_path), SimpleNamespace(eos_token_id=own)) == expected


@pytest.mark.parametrize("eos", ["5", [5, "9"], True, 5.0, [[5]]])
def test_eos_ids_that_are_no_ints(tmp_path: Path, eos: object) -> None:
    write_json(tmp_path / "generation_config.json", {"eos_token_id": eos})
    with pytest.raises(ValueError, match="eos_token_id must be ints"):
        load_eos_token_ids(str(tmp_path), SimpleNamespace(eos_token_id=9))


def test_generation_config_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        load_eos_token_ids(str(tmp_path), SimpleNamespace(eos_token_id=9))


@pytest.fixture
def emits_5(tmp_path: Path) -> Path:
    """A model that always emits 5; its tokenizer's EOS is 9."""
    folder = make_checkpoint(tmp_path)
    emit_always(folder, 5)
    nine = load_tokenizer(str(folder)).convert_ids_to_tokens(9)
    edit_json(folder / "tokenizer_config.json", eos_token=nine)
    assert load_tokenizer(str(folder)).eos_token_id == 9
    return folder


def complete(folder: Path, ignore_eos: bool) -> tuple[list[int], str]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=ignore_eos)
    with LLM(folder, device="cpu", num_kvcache_blocks=4, kvcache_block_size=4) as llm:
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    return output["token_ids"], output["finish_reason"]


def test_case_26_generation_stops_at_any_listed_eos(emits_5: Path) -> None:
    """[5, 9] stops at 5; with ignore_eos it does not; without the file 9 alone counts, and a model
    that emits 9 stops there."""
    write_json(emits_5 / "generation_config.json", {"eos_token_id": [5, 9]})
    assert complete(emits_5, ignore_eos=False) == ([5], "stop")
    assert complete(emits_5, ignore_eos=True) == ([5, 5, 5, 5], "length")
    (emits_5 / "generation_config.json").unlink()
    assert complete(emits_5, ignore_eos=False) == ([5, 5, 5, 5], "length")
    emit_always(emits_5, 9)
    assert complete(emits_5, ignore_eos=False) == ([9], "stop")
