"""chat: the tokenizer's own template in, completions out; and what is no conversation."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import TINY_QWEN3

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
WHO = [{"role": "user", "content": "Who are you?"}]
LONGER = [
    {"role": "system", "content": "You are a king."},
    {"role": "user", "content": "ROMEO:"},
    {"role": "assistant", "content": "O!"},
    {"role": "user", "content": "JULIET:"},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY_QWEN3, device="cpu", num_kvcache_blocks=8) as llm:
        yield llm


def test_one_conversation_or_several(llm: LLM) -> None:
    """vLLM's two shapes: a list of messages, and a list of such lists; results in their order."""
    together = llm.chat([WHO, LONGER, tuple(WHO)], GREEDY, use_tqdm=False)
    assert [llm.chat(one, GREEDY, use_tqdm=False)[0] for one in (WHO, LONGER)] == together[:2]
    assert together[2] == together[0] != together[1]


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [WHO, LONGER])
def test_the_prompt_is_what_the_template_makes(
    llm: LLM, messages: list[dict[str, str]], generation_prompt: bool
) -> None:
    """With the special tokens as single ids, each once."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    text += "<|im_start|>assistant\n" if generation_prompt else ""
    expected = llm.generate([llm.tokenizer.encode(text)], GREEDY, use_tqdm=False)
    params = {"use_tqdm": False, "add_generation_prompt": generation_prompt}
    assert llm.chat(messages, GREEDY, **params) == expected
    ids = llm.tokenizer.encode(text)
    assert ids.count(2046) == len(messages) + generation_prompt and ids.count(2047) == len(messages)


def test_params_for_each(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 5)]
    outputs = llm.chat([WHO, LONGER], params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [2, 5]
    assert llm.chat(WHO, use_tqdm=False)[0]["finish_reason"] in ("stop", "length")


def test_messages_are_not_changed(llm: LLM) -> None:
    before = [dict(message) for message in LONGER]
    llm.chat(LONGER, GREEDY, use_tqdm=False)
    assert before == LONGER


def test_a_missing_template_says_what_to_do(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match=r"no chat template: use generate\(\) .*tokenizer_config"):
        llm.chat(WHO, GREEDY)
    assert llm.is_finished()


MESSAGE = WHO[0]
MALFORMED: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "must be a list of messages, or a list of such lists, got None"),
    ("Who are you?", TypeError, "got 'Who are you\\?'"),
    (MESSAGE, TypeError, "must be a list of messages"),
    ([], ValueError, "conversations is empty"),
    ([[]], ValueError, "conversation 0 is empty"),
    ([WHO, []], ValueError, "conversation 1 is empty"),
    (["Who are you?"], TypeError, "conversation 0 must be a list of messages"),
    ([WHO, MESSAGE], TypeError, "conversation 1 must be a list of messages"),
    ([MESSAGE, WHO], TypeError, "conversation 0: each message must be a dict"),
    ([WHO, [MESSAGE, 5]], TypeError, "conversation 1: each message must be a dict .* got 5"),
    ([{"role": "user"}], TypeError, "'role' and 'content'"),
    ([{"content": "Who?"}], TypeError, "'role' and 'content'"),
    ([{"role": 3, "content": "Who?"}], TypeError, "'role' and 'content'"),
    ([{"role": "user", "content": b"Who?"}], TypeError, "both text"),
    ([{"role": "user", "content": None}], ValueError, "conversation 0: the chat template refused"),
    ([{"role": "user", "content": 5}], TypeError, "both text"),
    ([{"role": "user", "content": "\ud800"}], ValueError, "cannot be tokenized"),
]


def test_options_of_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen3's enable_thinking. One that the call itself sets is refused."""
    template = "{{ messages[0].content }}{% if not think | default(true) %}!{% endif %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    prompts: list[str] = []
    encode = llm.tokenizer.encode
    monkeypatch.setattr(
        llm.tokenizer, "encode", lambda text, **keys: prompts.append(text) or encode(text, **keys)
    )
    for options in (None, {}, {"think": True}, {"think": False}):
        llm.chat(WHO, GREEDY, use_tqdm=False, chat_template_kwargs=options)
    assert prompts == [WHO[0]["content"]] * 3 + [WHO[0]["content"] + "!"]
    with pytest.raises(TypeError, match="chat_template_kwargs must be a dict, got 'think'"):
        llm.chat(WHO, GREEDY, use_tqdm=False, chat_template_kwargs="think")
    with pytest.raises(ValueError, match="conversation 0: the chat template refused it"):
        llm.chat(WHO, GREEDY, use_tqdm=False, chat_template_kwargs={"tokenize": True})


def test_a_conversation_too_long_is_told_once(
    llm: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By our error, not by the tokenizer's warning before it too."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(ValueError, match=r"leaves no room .* max_model_len=2048: shorten it"):
        llm.chat([{"role": "user", "content": "Speak! " * 3000}], GREEDY, use_tqdm=False)
    assert not caplog.records


@pytest.mark.parametrize(("conversations", "error", "match"), MALFORMED)
def test_malformed_conversations(
    llm: LLM, conversations: Any, error: type[Exception], match: str
) -> None:
    """Each says which conversation, and nothing is added for the good ones."""
    with pytest.raises(error, match=match) as raised:
        llm.chat(conversations, GREEDY, use_tqdm=False)
    assert raised.type is error
    assert llm.is_finished() and not llm.requests


def test_a_template_that_raises(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many demand that roles alternate, or know no system message."""
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system!') }}{% endif %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template + "ROMEO:")
    with pytest.raises(ValueError, match=r"conversation 1: the chat template .* No system!"):
        llm.chat([WHO, LONGER], GREEDY, use_tqdm=False)
    assert llm.is_finished() and not llm.requests
    assert llm.chat([WHO], GREEDY, use_tqdm=False) == llm.generate(
        ["ROMEO:"], GREEDY, use_tqdm=False
    )
