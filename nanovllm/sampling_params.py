"""SamplingParams: what one request asks of the sampler and of the stop rule, validated once."""

import math
from dataclasses import dataclass
from reprlib import repr as shown  # cut short

from nanovllm.utils.checks import check_bool, check_int, check_number, keep_int

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Per-request settings, in vLLM's names and meanings.

    Which token:
    temperature: divides the logits before sampling; 0 is greedy (argmax). Finite, >= 0.
    top_k: sample among the k most probable tokens (ties with the k-th included); 0 or -1: all.
    top_p: then among the smallest set of most probable tokens whose share is >= top_p, in (0, 1].
    min_p: only tokens at least min_p times as probable as the best one, in [0, 1]. Applied first.
    seed: 64 bits that fix this request's randomness: with equal logits the same seed gives the
        same tokens, whatever else is in the batch. None draws a fresh one.

    When it ends:
    max_tokens: completion tokens after which the request finishes with "length", >= 1.
    min_tokens: no EOS, stop id or stop string ends it before so many, 0..max_tokens.
    ignore_eos: go on after an end-of-sequence id (for benchmarks).
    stop: strings that end the completion; the text is cut before the one found first.
    stop_token_ids: ids that end it as an EOS does.

    What is reported:
    logprobs: for each token, the log-probabilities (of the model: before temperature and the
        filters) of the n best and of the token itself; 0..20, None for none.

    Raises TypeError for a value of the wrong type, ValueError for one out of bounds.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "finite and >= 0 (0 is greedy)", 0)
        keep_int(self, "max_tokens", 1)
        check_bool("ignore_eos", self.ignore_eos)
        keep_int(self, "top_k", -1)
        check_number("top_p", self.top_p, "in (0, 1]", math.ulp(0.0), 1)
        check_number("min_p", self.min_p, "in [0, 1]", 0, 1)
        if self.seed is not None:
            keep_int(self, "seed", -(2**63), 2**64 - 1)
        keep_int(self, "min_tokens", 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be in 0..max_tokens, got {self.min_tokens} with "
                f"max_tokens={self.max_tokens}"
            )
        if self.logprobs is not None:
            keep_int(self, "logprobs", 0, MAX_LOGPROBS)
        # Kept as tuples, so that a caller's list can change without changing a running request.
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))


def _checked_stop(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or any(not isinstance(s, str) for s in strings):
        raise TypeError(f"stop must be a string or a list of strings, got {shown(stop)}")
    if "" in strings:
        raise ValueError("stop must not hold an empty string: it would end every completion")
    return tuple(strings)


def _checked_ids(ids: object) -> tuple[int, ...]:
    ids = () if ids is None else ids
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"stop_token_ids must be a list of ints >= 0, got {shown(ids)}")
    return tuple(check_int("each of stop_token_ids", token_id, 0) for token_id in ids)
