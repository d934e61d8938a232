"""SamplingParams: what one request asks of the sampler and of the stop rule, validated once."""

import math
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Per-request settings, in vLLM's names and meanings.

    temperature: divides the logits before sampling; 0 is greedy (argmax). Finite, >= 0.
    max_tokens: completion tokens after which the request finishes with "length". An int >= 1.
    ignore_eos: go on after an end-of-sequence id (for benchmarks).

    Raises TypeError for a value of the wrong type, ValueError for one out of bounds.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # bool is an int in Python; a request for True tokens is a mistake, not a wish for one.
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, Real):
            raise TypeError(
                f"temperature must be a number >= 0 (0 is greedy), got {self.temperature!r}"
            )
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature must be finite and >= 0 (0 is greedy), got {self.temperature!r}"
            )
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int):
            raise TypeError(f"max_tokens must be an int >= 1, got {self.max_tokens!r}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens!r}")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
