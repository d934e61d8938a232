"""Prompts: what a caller gives -> checked token ids and sampling parameters, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as shown  # cut short
from typing import TYPE_CHECKING, Any, TypeAlias

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import as_int

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt: TypeAlias = str | list[int]
Conversation: TypeAlias = list[dict[str, Any]]


def paired(
    prompts: str | list[Prompt],
    sampling_params: SamplingParams | list[SamplingParams] | None,
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters. Raises TypeError or ValueError for an empty list, lengths
    that differ, or parameters of another type."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts must be a list of texts or token-id lists, got {shown(prompts)}")
    if not prompts:
        raise ValueError("prompts is empty: give at least one prompt")
    if not isinstance(sampling_params, (list, tuple)):
        return [(prompt, checked_params(sampling_params)) for prompt in prompts]
    if len(sampling_params) != len(prompts):
        raise ValueError(
            f"{len(prompts)} prompts but {len(sampling_params)} sampling_params: give one for "
            "all, or one for each"
        )
    checked = [checked_params(params, f"prompt {i}: ") for i, params in enumerate(sampling_params)]
    return list(zip(prompts, checked, strict=True))


def checked_params(sampling_params: SamplingParams | None, where: str = "") -> SamplingParams:
    """The parameters themselves, or the defaults for None. TypeError for anything else."""
    if sampling_params is None:
        return SamplingParams()
    if not isinstance(sampling_params, SamplingParams):
        got = shown(sampling_params)
        raise TypeError(f"{where}sampling_params must be SamplingParams, got {got}")
    return sampling_params


def token_ids_of(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """Tokenize text; check ids. Raises TypeError or ValueError naming what is wrong."""
    if isinstance(prompt, str):
        token_ids = _encoded(prompt, tokenizer)
        if not token_ids:
            raise ValueError(f"the prompt {shown(prompt)} tokenizes to nothing: give some text")
    elif isinstance(prompt, (list, tuple)):
        token_ids = prompt
        if not token_ids:
            raise ValueError("the prompt has no token ids: give at least one")
    else:
        raise TypeError(
            f"a prompt must be text or a list of token ids, got {shown(prompt)} (a list of "
            "prompts, for generate, is as [[1, 2, 3]]; an array has tolist())"
        )
    return check_ids(token_ids, vocab_size, "token id")


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase, **options: bool) -> list[int]:
    try:
        return tokenizer.encode(text, verbose=False, **options)  # a length error is ours to tell
    except Exception as error:  # e.g. for half a surrogate pair, which is no text
        raise ValueError(f"the text {shown(text)} cannot be tokenized: {error}") from error


def check_ids(token_ids: Sequence[int], vocab_size: int, what: str) -> list[int]:
    """As plain ints. Raise TypeError for an id that is no int, ValueError for one outside
    0..vocab_size-1."""
    is_plain = {int}.issuperset(map(type, token_ids))
    ids = list(token_ids) if is_plain else list(map(as_int, token_ids))
    if None in ids:
        wrong = token_ids[ids.index(None)]
        raise TypeError(
            f"{what}s must be ints, got {shown(wrong)} (texts go unnested; an array has tolist())"
        )
    for token_id in (min(ids), max(ids)) if ids else ():  # they tell of all
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{what} {token_id} is outside the vocabulary 0..{vocab_size - 1}")
    return ids


def render_chat(
    conversations: Conversation | list[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Token ids of one conversation or several, by the tokenizer's chat template with its options.
    Raises ValueError if there is no template or it refuses a conversation, or for an empty one, and
    TypeError for another shape."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the model's tokenizer has no chat template: use generate() with plain prompts, or add "
            "a chat_template to tokenizer_config.json"
        )
    if not isinstance(conversations, (list, tuple)):
        raise TypeError(
            "conversations must be a list of messages, or a list of such lists, got "
            f"{shown(conversations)}"
        )
    if not isinstance(chat_template_kwargs, (dict, type(None))):
        raise TypeError(f"chat_template_kwargs must be a dict, got {shown(chat_template_kwargs)}")
    options = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
    if not conversations:
        raise ValueError("conversations is empty: give at least one message")
    if isinstance(conversations[0], dict):
        conversations = [conversations]
    for i, messages in enumerate(conversations):
        _check_conversation(messages, f"conversation {i}")
    return [
        _rendered(list(messages), tokenizer, options, f"conversation {i}")
        for i, messages in enumerate(conversations)
    ]


def _check_conversation(messages: Conversation, what: str) -> None:
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"{what} must be a list of messages, got {shown(messages)}")
    if not messages:
        raise ValueError(f"{what} is empty: give at least one message")
    for message in messages:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content", 0), (str, list, type(None)))
        ):
            raise TypeError(
                f"{what}: each message must be a dict with 'role' and 'content', both text "
                f"(content also a list of parts, or None, where the template takes them), got "
                f"{shown(message)}"
            )


def _rendered(
    messages: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
    what: str,
) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template raises what its author chose
        raise ValueError(f"{what}: the chat template refused it: {error}") from error
    # The template has written the special tokens already.
    return _encoded(text, tokenizer, add_special_tokens=False)
