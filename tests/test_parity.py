"""Random tiny checkpoints of every shape: logits equal transformers' at every position, and greedy
generation token for token. Float32 on the CPU, with each transformers version that is supported."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import (
    TQ,
    engine_logits,
    load_model,
    logit_errors,
    make_checkpoint,
    random_ids,
    reference_greedy,
    reference_logits,
    reference_model,
    write_config,
)

from nanovllm import LLM, SamplingParams
from nanovllm.utils.hf import load_model_config

SHAPES: dict[str, dict[str, Any]] = {
    "gqa 1": {"num_key_value_heads": 4},
    "gqa 2": {},
    "gqa 4": {"num_key_value_heads": 1},
    "case 33: head_dim 24": {"head_dim": 24},
    "heads wider than hidden": {"hidden_size": 48, "head_dim": 32, "num_key_value_heads": 1},
    "heads narrower than hidden": {"num_attention_heads": 2, "head_dim": 8},
    "tied": {"tie_word_embeddings": True},
    "case 32: attention_bias": {"attention_bias": True},
    "biased, tied, gqa 4, head_dim 24": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "head_dim": 24,
    },
    "sharded": {"max_shard_size": "100KB"},
    "sharded and tied": {"max_shard_size": "60KB", "tie_word_embeddings": True},
    "one layer, vocabulary 515": {"num_hidden_layers": 1, "vocab_size": 515, "seed": 1},
    "large epsilon": {"rms_norm_eps": 0.1},
    "theta 1e6": {"rope_theta": 1e6},
    "theta 12345": {"rope_theta": 12345.0},
}
ROPE_PLACES = ("top", "rope_parameters", "rope_scaling")
TOLERANCE = 1e-4
MAX_TOKENS = 10

each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def assert_equal_logits(folder: Path, reference: transformers.Qwen3ForCausalLM) -> None:
    """At every one of 150 positions."""
    token_ids = random_ids(150)
    expected = reference_logits(reference, token_ids)
    errors = logit_errors(engine_logits(load_model(folder), token_ids), expected)
    assert errors.max_abs < TOLERANCE, errors
    # Logits that hardly differ would agree whatever the model does.
    assert expected.std() > 1


def assert_equal_completions(folder: Path, reference: transformers.Qwen3ForCausalLM) -> None:
    """Prompts on both sides of block boundaries in one batch, the longest cut into chunks."""
    prompts = [random_ids(count, seed=count) for count in (1, 4, 5, 37)]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 64, "max_num_batched_tokens": 16}
    with LLM(folder, device="cpu", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["token_ids"] == reference_greedy(reference, prompt, MAX_TOKENS)


@each_shape
def test_logits_and_greedy_completions(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, **shape)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == ("max_shard_size" in shape)
    reference = reference_model(folder)
    assert_equal_logits(folder, reference)
    assert_equal_completions(folder, reference)


@pytest.mark.parametrize("theta", [1e6, 12345.0])
@pytest.mark.parametrize("place", ROPE_PLACES)
def test_case_30_rope_theta_in_each_place(tmp_path: Path, place: str, theta: float) -> None:
    """Old and new transformers each read only some of these files, so the reference is loaded from
    the file that this version has written itself."""
    folder = make_checkpoint(tmp_path, rope_theta=theta)
    reference = reference_model(folder)
    nested = {"rope_type": "default", "rope_theta": theta}
    write_config(folder, **({"rope_theta": theta} if place == "top" else {place: nested}))
    assert_equal_logits(folder, reference)
    assert_equal_completions(folder, reference)


def test_case_30_theta_matters(tmp_path: Path) -> None:
    """The two bases, and transformers' default, give logits far apart: the tests above can fail."""
    references = [
        reference_model(make_checkpoint(tmp_path / str(theta), rope_theta=theta))
        for theta in (1e6, 12345.0, 10_000.0)
    ]
    first, second, third = (reference_logits(model, random_ids(150)) for model in references)
    for a, b in ((first, second), (second, third)):
        assert logit_errors(a, b).max_abs > 100 * TOLERANCE


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_case_30_dtype_under_either_name_or_none(tmp_path: Path, key: str | None) -> None:
    """bfloat16 weights are computed with in float32 on the CPU, whatever the file says of them;
    where it says nothing, their own dtype counts."""
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16, rope_theta=1e6)
    reference = reference_model(folder)
    named = {} if key is None else {key: "bfloat16"}
    write_config(folder, rope_theta=1e6, **named)
    assert load_model_config(str(folder)).dtype == "bfloat16"
    assert_equal_logits(folder, reference)
    assert_equal_completions(folder, reference)


def test_a_model_of_the_files_shape_not_of_the_defaults(tmp_path: Path) -> None:
    """config.json without head_dim means 128, in transformers as here."""
    folder = make_checkpoint(tmp_path, head_dim=128)
    reference = reference_model(folder)
    assert TQ["hidden_size"] // TQ["num_attention_heads"] != 128
    write_config(folder, head_dim=None)
    assert_equal_logits(folder, reference)
