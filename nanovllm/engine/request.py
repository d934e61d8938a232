"""Request: what the engine keeps about a request besides its Sequence: growing text, logprobs."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypedDict

from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet
MAX_WINDOW, MIN_WINDOW = 32, 16  # tokens


class Completion(TypedDict):
    """One prompt's result. token_ids: the completion only, a final EOS id included;
    text: token_ids decoded without special tokens, cut before a stop string;
    finish_reason: "stop" (EOS, stop id, stop string), "length" or "abort";
    logprobs: if asked for, per token {id: log-probability} of the best ids and of the token."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]] | None


class Increment(TypedDict):
    """What `stream` yields: the next piece of one prompt's completion.

    index: of the prompt; request_id: what `abort` takes; text, token_ids: what is new (their
    concatenation is the completion's); finish_reason: None until the prompt's last increment."""

    index: int
    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class Detokenizer:
    """The text of a completion while it grows, in whole characters, and its stop strings.

        |<- text of ids[:read] ->|<- held back: the bytes of a character still to be completed ->|

    Decoded are ids[start:], a few tokens before `read` included: a token's text can depend on the
    one before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""
        self._token_ids: list[int] = []
        self._start = self._read = 0
        self._window = ""  # ids[start:] decoded
        self._num_known = 0  # characters of the window that are in `text`

    def append(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token. True if `may_stop` and a stop string ends in what it added; the text is
        then cut before it. A character whose bytes are not all there yet stays out of the text."""
        self._token_ids.append(token_id)
        window = self._decode(self._start)
        if window == self._window and not self._decode(-1):
            self._token_ids.pop()  # special tokens add nothing; a long row of them adds no work
            return False
        searched = len(self.text)
        whole = window.rstrip(REPLACEMENT)
        self.text += whole[self._num_known :]
        if len(whole) == len(window):
            self._start, self._read = self._read, len(self._token_ids)
            window = self._decode(self._start)
            self._num_known = len(window)
        else:
            self._num_known = max(self._num_known, len(whole))
            if len(self._token_ids) - self._start > MAX_WINDOW:
                window = self._shortened(window)
        self._window = window
        return may_stop and self._cut_at_stop(searched)

    def _shortened(self, window: str) -> str:
        """After many bytes that are no character, a window of few tokens: to decode all of them
        again for each token would take time quadratic in their number. Of a character still to be
        completed at most three bytes are here, so what is before the last three replacements is
        text; both windows end alike."""
        settled = max(self._num_known, len(window) - 3)
        self.text += window[self._num_known : settled]
        self._start = len(self._token_ids) - MIN_WINDOW
        self._read = max(self._read, self._start)
        shorter = self._decode(self._start)
        self._num_known = settled - (len(window) - len(shorter))
        return shorter

    def settled_text(self) -> str:
        """The text without an end that may be the beginning of a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        for held_back in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-held_back:]) for stop in self.stop):
                return self.text[:-held_back]
        return self.text

    def _decode(self, start: int) -> str:
        return self.tokenizer.decode(self._token_ids[start:], skip_special_tokens=True)

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
        self,
        seq: Sequence,
        tokenizer: PreTrainedTokenizerBase,
        index: int | None = None,
        news: deque[Request] | None = None,
    ) -> None:
        """index: of its prompt in the call, None for `add_request`; news: for a stream, where to
        report a change."""
        params = seq.sampling_params
        self.seq = seq
        self.tokenizer = tokenizer
        self.index = index
        self.news = news
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        # Token by token only where somebody looks: for most requests one decode at the end does.
        watched = params.stop or news is not None
        self.detokenizer = Detokenizer(tokenizer, params.stop) if watched else None
        self.stopped_by_string = False
        self._num_accepted = self._num_streamed = 0
        self._streamed_text = ""
        self._has_ended = False  # its last increment has been given out

    def accept(self, token_id: int, logprobs: dict[int, float] | None) -> bool:
        """Take note of the token that `seq` just accepted. True if a stop string ends it."""
        self._num_accepted += 1
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        if self.detokenizer is not None:
            may_stop = self._num_accepted >= self.seq.sampling_params.min_tokens
            self.stopped_by_string = self.detokenizer.append(token_id, may_stop)
        self.report()
        return self.stopped_by_string

    def report(self) -> None:
        """Tell the stream, if there is one, that something is new."""
        if self.news is not None:
            self.news.append(self)

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

    def increment(self) -> Increment | None:
        """What is new since the last call, or None if nothing is."""
        token_ids = self.seq.completion_token_ids[self._num_streamed :]
        ends = self.seq.is_finished
        if self._has_ended or not (token_ids or ends):
            return None
        text = self.text() if ends else self.detokenizer.settled_text()
        increment = Increment(
            index=self.index,
            request_id=self.seq.seq_id,
            text=text[len(self._streamed_text) :],
            token_ids=token_ids,
            finish_reason=self.seq.finish_reason,
        )
        self._num_streamed += len(token_ids)
        self._streamed_text, self._has_ended = text, ends
        return increment
