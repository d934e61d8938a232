"""The sampling controls in a running engine: what ends a completion, and log-probabilities against
transformers. test_seeds.py has the seeds."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    emit_always,
    make_checkpoint,
    random_ids,
    reference_logits,
    reference_model,
    write_json,
)
from recording import script

from nanovllm import LLM, SamplingParams

OWN_EOS = 2047  # what the bundled tokenizer calls its end of sequence


@pytest.fixture
def llm(wide_tq: Path) -> Iterator[LLM]:
    with start(wide_tq) as engine:
        yield engine


def start(folder: Path, **settings: Any) -> LLM:
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 96, **settings}
    return LLM(folder, device="cpu", **settings)


def complete(llm: LLM, prompts: list, params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


# --- what ends a completion -----------------------------------------------------------------------


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_min_tokens_holds_back_every_end(
    tmp_path: Path, min_tokens: int, temperature: float
) -> None:
    """A model that wants nothing but EOS: not before min_tokens others, and right after them."""
    emit_always(make_checkpoint(tmp_path, vocab_size=2048), 5)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 9]})
    params = SamplingParams(temperature=temperature, min_tokens=min_tokens, max_tokens=9)
    with start(tmp_path) as llm:
        for output in llm.generate([[1, 2], [3]], params, use_tqdm=False):
            *before, last = output["token_ids"]
            assert len(before) == min_tokens and last == 5
            assert not {5, 9, OWN_EOS} & set(before)
            assert output["finish_reason"] == "stop"


def test_min_tokens_holds_back_stop_ids_and_not_an_ignored_eos(tmp_path: Path) -> None:
    emit_always(make_checkpoint(tmp_path, vocab_size=2048), 5)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 5})
    with start(tmp_path) as llm:
        stop = SamplingParams(
            temperature=0, min_tokens=3, max_tokens=9, ignore_eos=True, stop_token_ids=[5]
        )
        ignoring = SamplingParams(temperature=0, min_tokens=3, max_tokens=9, ignore_eos=True)
        stopped, ignored = complete(llm, [[1], [1]], [stop, ignoring])
        assert len(stopped) == 4 and stopped.index(5) == 3
        assert ignored == [5] * 9


def speak(llm: LLM, text: str, *more: int) -> list[int]:
    """Let the model say just this, then `more` ids, then "x" for ever; the ids of all that."""
    ids = [*llm.tokenizer.encode(text), *more]
    x = llm.tokenizer.encode("x")[0]
    script(llm, lambda seq: [*ids, *[x] * 99][seq.num_completion_tokens])
    return ids


def test_stop_token_ids(llm: LLM) -> None:
    """Any of them ends it as an EOS does: the id is the last of token_ids, and has its text."""
    ids = speak(llm, "To be, or not to be")
    params = SamplingParams(stop_token_ids=[11, ids[3], 2000], max_tokens=9)
    assert ids[2] == 11
    (output,) = llm.generate(["Good"], params, use_tqdm=False)
    assert (output["text"], output["token_ids"]) == ("To be,", ids[:3])
    assert output["finish_reason"] == "stop"
    (output,) = llm.generate([[11]], SamplingParams(stop_token_ids=[11]), use_tqdm=False)
    assert output["token_ids"] == ids[:3], "an id in the prompt stops nothing"


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        (" not", "To be, or", 5),
        ("o be, or n", "T", 5),
        (["Hamlet", " to", ","], "To be", 3),
        ("To", "", 1),
    ],
)
def test_stop_strings(llm: LLM, stop: Any, text: str, count: int) -> None:
    """Cut from the text; token_ids end with the token that completed it."""
    ids = speak(llm, "To be, or not to be", OWN_EOS)
    (output,) = llm.generate(["Good"], SamplingParams(stop=stop), use_tqdm=False)
    assert (output["text"], output["token_ids"]) == (text, ids[:count])
    assert output["finish_reason"] == "stop"
    assert llm.is_finished() and llm.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize(
    ("params", "text", "count"),
    [
        # With the last token that max_tokens allows.
        ({"stop": "or", "max_tokens": 4}, "To be, ", 4),
        # With a token that is a stop id as well, which is not special and has its text.
        ({"stop": "or", "stop_token_ids": "4th"}, "To be, ", 4),
        # EOS comes first.
        ({"stop": "x"}, "To be, or not to be", 8),
        # Found in nothing: EOS, max_tokens.
        ({"stop": ["xyz", "To not"]}, "To be, or not to be", 8),
        ({"stop": "or not", "max_tokens": 4}, "To be, or", 4),
    ],
)
def test_stop_strings_at_once_with_another_end(
    llm: LLM, params: dict[str, Any], text: str, count: int
) -> None:
    """Whichever ended it, a stop string in the text is cut out and makes it a "stop"."""
    ids = speak(llm, "To be, or not to be", OWN_EOS)
    if "stop_token_ids" in params:
        params = params | {"stop_token_ids": [ids[3]]}
    (output,) = llm.generate(["Good"], SamplingParams(**params), use_tqdm=False)
    assert (output["text"], output["token_ids"]) == (text, ids[:count])
    assert output["finish_reason"] == ("length" if params["stop"] == "or not" else "stop")


def test_a_stop_string_before_min_tokens_does_not_stop(llm: LLM) -> None:
    ids = speak(llm, "To be, or not to be", OWN_EOS)
    params = SamplingParams(stop="be", min_tokens=3)
    (output,) = llm.generate(["Good"], params, use_tqdm=False)
    assert (output["text"], output["token_ids"]) == ("To be, or not to ", ids[:7])


def test_each_request_stops_by_its_own(llm: LLM) -> None:
    """Also where a stopped one has left the batch in the middle of the others' completions."""
    ids = speak(llm, "To be, or not to be", OWN_EOS)
    stops = [",", None, [" not"], "zzz"]
    params = [SamplingParams(stop=stop) for stop in stops]
    outputs = llm.generate([[1]] * 4, params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [3, 8, 5, 8]
    assert outputs[1]["text"] == outputs[3]["text"] == "To be, or not to be"
    assert outputs[1]["token_ids"] == ids


# --- logprobs -------------------------------------------------------------------------------------


def check_logprobs(
    outputs: list[Any], prompts: list[list[int]], counts: list[int | None], wide_tq: Path
) -> None:
    """For each token the log_softmax of transformers' logits at its position, the best first."""
    model = reference_model(wide_tq)
    for output, prompt, count in zip(outputs, prompts, counts, strict=True):
        if count is None:
            assert output["logprobs"] is None
            continue
        token_ids = output["token_ids"]
        logits = reference_logits(model, prompt + token_ids)[len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1)
        assert len(output["logprobs"]) == len(token_ids)
        for row, token_id, result in zip(exact, token_ids, output["logprobs"], strict=True):
            best = row.topk(count).indices.tolist()
            assert list(result)[:count] == best and set(result) == {*best, token_id}
            values = torch.tensor(list(result.values()))
            assert torch.allclose(values, row[list(result)], atol=1e-4)


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_logprobs_are_transformers_log_softmax(wide_tq: Path, llm: LLM, temperature: float) -> None:
    """Of the model, whatever the temperature and the filters; none for who does not ask."""
    prompts = [random_ids(count, seed=count) for count in (5, 9, 2, 7)]
    counts = [3, None, 0, 20]
    params = [
        SamplingParams(temperature, 8, True, top_k=40, top_p=0.9, logprobs=count)
        for count in counts
    ]
    check_logprobs(llm.generate(prompts, params, use_tqdm=False), prompts, counts, wide_tq)


def test_logprobs_one_for_each_token_through_chunks_and_preemption(wide_tq: Path) -> None:
    with start(wide_tq, max_num_batched_tokens=7, num_kvcache_blocks=12) as llm:
        llm.scheduler.learns_headroom = False
        prompts = [random_ids(count, seed=count) for count in (9, 16, 3, 11)]
        params = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True, logprobs=2)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["preemptions"] >= 2
        check_logprobs(outputs, prompts, [2] * 4, wide_tq)


def test_logprobs_are_from_before_the_bans_of_min_tokens(tmp_path: Path) -> None:
    """They are the model's; the banned EOS is the best of them."""
    emit_always(make_checkpoint(tmp_path, vocab_size=2048), OWN_EOS)
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=2, logprobs=1)
    with start(tmp_path) as llm:
        (output,) = llm.generate([[1, 2]], params, use_tqdm=False)
    for token_id, result in zip(output["token_ids"], output["logprobs"], strict=True):
        assert list(result) == [OWN_EOS, token_id] and token_id != OWN_EOS
        assert result[OWN_EOS] > result[token_id]
    check_logprobs([output], [[1, 2]], [1], tmp_path)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", [2048, 10**9])
@pytest.mark.parametrize("call", ["generate", "stream", "add_request"])
def test_a_stop_id_outside_the_vocabulary_is_refused(llm: LLM, token_id: int, call: str) -> None:
    params = SamplingParams(stop_token_ids=[1, token_id])
    uses: dict[str, Callable[[], object]] = {
        "generate": lambda: llm.generate([[1]], params, use_tqdm=False),
        "stream": lambda: llm.stream([[1]], params),
        "add_request": lambda: llm.add_request([1], params),
    }
    with pytest.raises(ValueError, match=rf"stop token id {token_id} is outside .* 0\.\.2047"):
        uses[call]()
    assert llm.is_finished()
