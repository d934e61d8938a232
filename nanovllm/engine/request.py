"""Request: what the engine keeps about a request besides its Sequence: growing text, logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Completion(TypedDict):
    """One prompt's result. token_ids: the completion only, a final EOS id included;
    text: token_ids decoded without special tokens, cut before a stop string;
    finish_reason: "stop" (EOS, stop id, stop string) or "length";
    logprobs: if asked for, per token {id: log-probability} of the best ids and of the token."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]] | None


class Increment(TypedDict):
    """What `stream` yields: the next piece of one prompt's completion.

    index: of the prompt; text, token_ids: what is new (their concatenation is the completion's);
    finish_reason: None until the last increment of the prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class Detokenizer:
    """The text of a completion while it grows, in whole characters, and its stop strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""
        self._token_ids: list[int] = []
        # token_ids[start:read] have been turned into text; they are decoded again with the ones
        # after them, since a token's text can depend on the token before it.
        self._start = self._read = 0

    def append(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token. True if `may_stop` and a stop string ends in what it added; the text is
        then cut before it. A character whose bytes are not all there yet stays out of the text."""
        self._token_ids.append(token_id)
        before = self._decode(self._start, self._read)
        after = self._decode(self._start, len(self._token_ids))
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return False
        searched = len(self.text)
        self.text += after[len(before) :]
        self._start, self._read = self._read, len(self._token_ids)
        return may_stop and self._cut_at_stop(searched)

    def settled_text(self) -> str:
        """The text without an end that may be the beginning of a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        for held_back in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-held_back:]) for stop in self.stop):
                return self.text[:-held_back]
        return self.text

    def _decode(self, start: int, end: int) -> str:
        return self.tokenizer.decode(self._token_ids[start:end], skip_special_tokens=True)

    def _cut_at_stop(self, searched: int) -> bool:
        found = []
        for stop in self.stop:
            position = self.text.find(stop, max(searched - len(stop) + 1, 0))
            if position >= 0:
                found.append(position)
        if found:
            self.text = self.text[: min(found)]
        return bool(found)


class Request:
    """A Sequence and its output. The engine makes one per prompt and updates it in `step`."""

    def __init__(
        self, seq: Sequence, tokenizer: PreTrainedTokenizerBase, streamed: bool = False
    ) -> None:
        params = seq.sampling_params
        self.seq = seq
        self.tokenizer = tokenizer
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        # Token by token only where somebody looks: for most requests one decode at the end does.
        self.detokenizer = Detokenizer(tokenizer, params.stop) if params.stop or streamed else None
        self.stopped_by_string = False
        self._num_accepted = self._num_streamed = 0
        self._streamed_text = ""

    def accept(self, token_id: int, logprobs: dict[int, float] | None) -> bool:
        """Take note of the token that `seq` just accepted. True if a stop string ends it."""
        self._num_accepted += 1
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        if self.detokenizer is None:
            return False
        may_stop = self._num_accepted >= self.seq.sampling_params.min_tokens
        self.stopped_by_string = self.detokenizer.append(token_id, may_stop)
        return self.stopped_by_string

    def text(self) -> str:
        """The final text: the tokenizer's own decoding of the whole completion."""
        if self.stopped_by_string:
            return self.detokenizer.text
        return self.tokenizer.decode(self.seq.completion_token_ids, skip_special_tokens=True)

    def completion(self) -> Completion:
        """The result of a finished request."""
        return Completion(
            text=self.text(),
            token_ids=self.seq.completion_token_ids,
            finish_reason=self.seq.finish_reason,
            logprobs=self.logprobs,
        )

    def increment(self, index: int) -> Increment | None:
        """What is new since the last call, or None if nothing is."""
        token_ids = self.seq.completion_token_ids[self._num_streamed :]
        if not token_ids:
            return None
        text = self.text() if self.seq.is_finished else self.detokenizer.settled_text()
        new_text = text[len(self._streamed_text) :]
        self._num_streamed += len(token_ids)
        self._streamed_text = text
        return Increment(
            index=index, text=new_text, token_ids=token_ids, finish_reason=self.seq.finish_reason
        )
