"""nanovllm: offline inference for Qwen3 models. The whole public surface: LLM, SamplingParams."""

from typing import TYPE_CHECKING

from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    # LLM is imported on first use, so that the scheduling half (`nanovllm.engine.scheduler` and
    # what it needs) can be imported, tested and changed on a machine without torch.
    if name == "LLM":
        from nanovllm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
