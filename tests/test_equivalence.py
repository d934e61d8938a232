"""Each way of computing a completion against a plainer one: float32 on CPU, the same token path,
logits compared at every step. Greedy tokens are compared as well: random checkpoints have logits
that lie far apart, and the bundled model's are peaked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    make_checkpoint,
    random_ids,
    reference_greedy,
    reference_logits,
    reference_model,
)
from recording import Watch, add, assert_logits_agree

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence

TIGHT = 2e-5  # other summation orders of the same float32 arithmetic
TEXTS = ["ROMEO:\n", "First Citizen:\nBefore we proceed any further", "KING HENRY", "O", "\n\n"]
CHAT = "<|im_start|>user\nROMEO:<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def start(folder: Path, **settings: Any) -> Watch:
    """A watched engine with small blocks, so that every path crosses block boundaries."""
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 96, **settings}
    return Watch(LLM(folder, device="cpu", **settings))


def complete(
    watch: Watch, prompts: list[list[int]], max_tokens: int = MAX_TOKENS
) -> list[Sequence]:
    """Run all prompts together."""
    seqs = [add(watch.llm, prompt, max_tokens=max_tokens) for prompt in prompts]
    watch.run()
    return seqs


def assert_same(
    what: str, watch: Watch, seqs: list[Sequence], plain: Watch, plain_seqs: list[Sequence]
) -> None:
    """The same tokens, and logits that agree wherever a token was sampled."""
    for i, (seq, reference) in enumerate(zip(seqs, plain_seqs, strict=True)):
        logits = plain.logits_of(reference)
        sampled = range(reference.num_prompt_tokens - 1, reference.num_tokens - 1)
        expected = {position: logits[position] for position in sampled}
        assert_logits_agree(f"{what}, prompt {i}", watch.logits_of(seq), expected, TIGHT)
        assert seq.completion_token_ids == reference.completion_token_ids, what


# --- transformers ---------------------------------------------------------------------------------


def assert_like_transformers(folder: Path, watch: Watch, prompts: list[list[int]]) -> None:
    model = reference_model(folder)
    for i, seq in enumerate(complete(watch, prompts)):
        expected = reference_logits(model, seq.token_ids)
        sampled = range(seq.num_prompt_tokens - 1, seq.num_tokens - 1)
        assert_logits_agree(
            f"transformers, prompt {i}", watch.logits_of(seq), {p: expected[p] for p in sampled}
        )
        assert seq.completion_token_ids == reference_greedy(model, seq.prompt_token_ids, MAX_TOKENS)


def test_transformers_random_model(folder: Path) -> None:
    """A batch of prompts from 1 to 300 ids, cut into chunks of 128."""
    prompts = [random_ids(count, seed=count) for count in (1, 3, 4, 17, 300)]
    assert_like_transformers(folder, start(folder, max_num_batched_tokens=128), prompts)


def test_transformers_bundled_model(tiny_qwen3: Path) -> None:
    watch = start(tiny_qwen3)
    prompts = [watch.llm.tokenizer.encode(text) for text in TEXTS]
    assert_like_transformers(tiny_qwen3, watch, prompts)


def test_generate_equals_transformers_generate(tiny_qwen3: Path) -> None:
    """Token for token and text for text, up to the end-of-sequence id, against transformers' own
    cached generation."""
    llm = LLM(tiny_qwen3, device="cpu", num_kvcache_blocks=16)
    model = reference_model(tiny_qwen3)
    texts = [*TEXTS, CHAT]
    params = SamplingParams(temperature=0, max_tokens=40)
    outputs = llm.generate(texts, params, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        ids = torch.tensor([llm.tokenizer.encode(text)])
        mask = torch.ones_like(ids)
        generated = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
        completion = generated[0, ids.shape[1] :].tolist()
        assert output["token_ids"] == completion
        assert output["text"] == llm.tokenizer.decode(completion, skip_special_tokens=True)
    assert {output["finish_reason"] for output in outputs} == {"stop", "length"}


# --- the engine against its own plainer paths -----------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 16, 29])
def test_chunked_prefill_equals_whole(folder: Path, budget: int) -> None:
    """Budgets below, at, across and beside the block size of 4."""
    prompts = [random_ids(count, seed=count) for count in (30, 2, 13)]
    whole, chunked = start(folder), start(folder, max_num_batched_tokens=budget)
    expected = complete(whole, prompts, max_tokens=6)
    seqs = complete(chunked, prompts, max_tokens=6)
    assert whole.steps[0].num_tokens == 45
    assert max(step.num_tokens for step in chunked.steps) == budget
    assert_same(f"chunks of {budget}", chunked, seqs, whole, expected)


@pytest.mark.parametrize("shared", [4, 23, 24])
def test_prefix_hit_equals_cold(folder: Path, shared: int) -> None:
    """A prompt of 30 ids whose first `shared` were computed for another one (24 = 6 blocks; of 23
    only 5 blocks are full)."""
    first = random_ids(30, seed=1)
    second = first[:shared] + random_ids(30 - shared, seed=2)
    assert first[shared] != second[shared]
    cold, warm = start(folder), start(folder)
    expected = complete(cold, [second])
    complete(warm, [first])
    seqs = complete(warm, [second])
    prefill = next(step for step in warm.steps if seqs[0] in step.seqs)
    assert prefill.num_tokens == 30 - shared // 4 * 4, "no prefix hit"
    assert_same(f"prefix of {shared}", warm, seqs, cold, expected)


def test_prefix_hit_on_a_completion_equals_cold(folder: Path) -> None:
    """A dialogue's second turn: the first turn's prompt and completion are both hit, i.e. K/V
    written by decode steps serves as well as K/V written by a prefill."""
    cold, warm = start(folder), start(folder)
    (first,) = complete(warm, [random_ids(10, seed=3)])
    turn = first.token_ids + random_ids(5, seed=4)  # 10 + 12 + 5
    seqs = complete(warm, [turn])
    prefill = next(step for step in warm.steps if seqs[0] in step.seqs)
    assert prefill.positions == [*range(20, 27)], "21 positions have K/V: 5 full blocks"
    assert_same("second turn", warm, seqs, cold, complete(cold, [turn]))


def test_preempted_and_resumed_equals_never_preempted(folder: Path) -> None:
    """A pool of 12 blocks for six requests that would need 30: they are preempted over and over."""
    prompts = [random_ids(count, seed=count) for count in (4, 7, 9, 3, 6, 8)]
    roomy, tight = start(folder), start(folder, num_kvcache_blocks=12)
    tight.llm.scheduler.learns_headroom = False  # which would leave few to preempt
    preempted: list[Sequence] = []
    preempt = tight.llm.scheduler.preempt
    tight.llm.scheduler.preempt = lambda seq: preempted.append(seq) or preempt(seq)
    expected = complete(roomy, prompts, max_tokens=14)
    seqs = complete(tight, prompts, max_tokens=14)
    assert len(preempted) >= 5 and any(seq.num_completion_tokens for seq in preempted)
    assert_same("preempted", tight, seqs, roomy, expected)


def test_batched_equals_alone(folder: Path) -> None:
    """Eight requests of different lengths, in steps of at most 5, against each one alone."""
    prompts = [random_ids(1 + 5 * i, seed=i) for i in range(8)]
    together, alone = start(folder, max_num_seqs=5), start(folder)
    seqs = complete(together, prompts)
    assert max(len(step.seqs) for step in together.steps) == 5
    for prompt, seq in zip(prompts, seqs, strict=True):
        assert_same("batched", together, [seq], alone, complete(alone, [prompt]))


def test_block_size_changes_nothing(folder: Path) -> None:
    prompts = [random_ids(count, seed=count) for count in (1, 8, 31)]
    plain = start(folder, kvcache_block_size=256, num_kvcache_blocks=8)
    expected = complete(plain, prompts)
    for block_size in (1, 3, 16):
        watch = start(folder, kvcache_block_size=block_size)
        what = f"blocks of {block_size}"
        assert_same(what, watch, complete(watch, prompts), plain, expected)


def test_cache_equivalence(folder: Path) -> None:
    """A prompt of 64 ids, 8 forwards: 71 positions computed with the cache, 540 without, and the
    same logits at every step."""
    watch = start(folder, kvcache_block_size=256)
    prompt = random_ids(64, seed=12)
    cached = add(watch.llm, prompt, max_tokens=8)
    assert [step.num_tokens for step in watch.run()] == [64, -1, -1, -1, -1, -1, -1, -1]
    assert sum(len(step.positions) for step in watch.steps) == 71

    recomputed: dict[int, torch.Tensor] = {}
    computed = 0
    for count in range(8):
        # Shorter than a block, so nothing is registered in the prefix index and nothing hits.
        alone = add(watch.llm, cached.token_ids[: 64 + count], max_tokens=1)
        computed += len(watch.step().positions)
        recomputed |= watch.logits_of(alone)
        assert alone.last_token == cached.token_ids[64 + count]
    assert computed == 540
    assert_logits_agree("KV cache", watch.logits_of(cached), recomputed, tolerance=2e-5)
