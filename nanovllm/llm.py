"""LLM: the public class. All of it is LLMEngine; the name is the one that vLLM's users know."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """`LLM(model, **settings)` starts an engine; `generate` runs prompts through it. The settings
    are those of `nanovllm.config.Config`."""
