"""The start of an engine on a GPU that is not here, as far as Triton sees it: a process of its own
for test_compile_ahead.py. Prints as JSON the kernels that were compiled ahead, those compiled
later, and the errors of a kernel that does not compile, ahead and later.

Usage: compile_start.py MAX_NUM_SEQS"""

import json
import sys
from dataclasses import replace
from typing import Any

import compile_kernels
import pytest
import torch
import triton
import triton.language as tl
from compile_kernels import META, SHALLOW, zeros
from replaying import fake_capture

from nanovllm.config import Config
from nanovllm.engine.kv_cache import allocate_kv_cache
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.compile_ahead import compile_ahead
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.device import defaults

DEEP = replace(SHALLOW, num_hidden_layers=3)  # one more than are gone through


def compiled(work: Any) -> list[str]:
    """The kernels that are compiled meanwhile, a name for each compilation."""
    seen: set[tuple[str, str]] = set()
    # Called for each launch until the compilation has ended.
    triton.knobs.runtime.jit_cache_hook = lambda *, key, fn, **_: seen.add((fn.name, str(key)))
    work()
    triton.knobs.runtime.jit_cache_hook = None
    return sorted(name.rpartition(".")[2] for name, _ in seen)


def error_of(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class Runner(ModelRunner):
    """With a model that has a shape and no content."""

    def __init__(self, max_num_seqs: int) -> None:
        with defaults(META, torch.bfloat16):
            self.model = Qwen3ForCausalLM(DEEP, compile_kernels.attention)
        self.config = Config(model=".", max_model_len=4096, max_num_seqs=max_num_seqs)
        self.block_size = self.config.kvcache_block_size
        self.sampled = zeros(max_num_seqs)

    @torch.inference_mode()
    def _warm_up(self, params: SamplingParams) -> None:
        """As the runner's own, whose uploads need a GPU."""
        compile_kernels.prefill(self.model)

    def start(self) -> None:
        self._warm_up(SamplingParams())
        self.kv_cache = allocate_kv_cache(self.model, 8, self.block_size)
        self._capture_graphs(with_prefill=True)


@triton.jit
def wrong_kernel(x_ptr):
    tl.store(x_ptr, no_such_name)  # noqa: F821


def launch_wrong() -> Any:
    return wrong_kernel[(1,)](zeros(1))


if __name__ == "__main__":
    compile_kernels.stand_in(90, 227)
    fake_capture(pytest.MonkeyPatch())
    run = triton.runtime.JITFunction.run
    runner = Runner(int(sys.argv[1]))
    ahead = compiled(lambda: runner._compile_ahead(True, True))
    assert runner.graphs is None and runner.prefill_graphs is None
    attentions = [layer.self_attn.attn for layer in runner.model.model.layers]
    assert [attention.k_cache.numel() for attention in attentions] == [0, 0, 0]
    late = compiled(runner.start)
    # What a launch needs of a kernel, some versions of Triton ask for only then.
    errors = [error_of(lambda: compile_ahead(launch_wrong)), error_of(lambda: launch_wrong().asm)]
    assert triton.runtime.JITFunction.run is run
    print(json.dumps({"ahead": ahead, "late": late, "errors": errors}))
