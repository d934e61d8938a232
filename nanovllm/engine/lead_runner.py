"""LeadRunner: the ModelRunner of rank 0, which makes the other ranks do what it does."""

import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.control import StepWriter
from nanovllm.engine.model_runner import ModelRunner, needs_more_than_the_graph
from nanovllm.engine.workers import Workers
from nanovllm.layers.attention import torch_attention
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.device import resolve_device
from nanovllm.utils.hf import ModelConfig
from nanovllm.utils.parallel import TensorParallel


class LeadRunner(ModelRunner):
    """To the engine it is a ModelRunner. If a rank fails, all end, and every call from then on
    raises the RuntimeError that says which and why."""

    def __init__(
        self, config: Config, model_config: ModelConfig, eos_token_ids: frozenset[int]
    ) -> None:
        """As ModelRunner; RuntimeError if another rank cannot start. Then nothing is left."""
        size = config.tensor_parallel_size
        device = resolve_device(config.device, 0, size)
        _check_split(model_config, size)
        self._steps = StepWriter()
        try:
            self._workers = Workers(config, model_config, eos_token_ids)
            tp = self._workers.join_group(device)
            super().__init__(config, model_config, eos_token_ids, tp)
            self._workers.wait_until_ready()
        except BaseException as error:
            if not hasattr(self, "_workers"):
                raise  # they have ended themselves
            told = self._workers.fail(error)
            traceback.clear_frames(error.__traceback__)  # they hold the model
            if hasattr(self, "device"):
                super().exit()
            self._workers.end()
            if told is error:
                raise
            raise told from None

    def call(self, method: str, *args: Any) -> Any:
        if method == "exit":
            return self.exit()
        # A rank 0 that left a step halfway would leave the others waiting.
        with self._workers.ended_by_interrupts():
            try:
                return self._call(method, args)
            except BaseException as error:
                told = self._workers.fail(error)
                traceback.clear_frames(error.__traceback__)
                self.exit()
                if told is error:
                    raise
                raise told from None

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        self._workers.check()
        if method in ("run", "launch"):
            resample = needs_more_than_the_graph(args[0])
            self._workers.send("launch", self._steps.write(*args), args[1], resample)
        elif method not in ("check", "collect"):  # which are rank 0's alone
            self._workers.send(method, *args)
        result = getattr(self, method)(*args)
        self._workers.check()  # a rank lost on the way makes the result garbage
        return result

    def exit(self) -> None:
        """Let go of everything on every rank, and wait for the other ranks' end."""
        if self.model is not None:
            with suppress(OSError, RuntimeError):  # one may have ended already
                self._workers.send("exit")
        try:
            super().exit()
        finally:
            self._workers.end()


def _check_split(config: ModelConfig, size: int) -> None:
    """Raise ValueError, naming both numbers, if the model cannot be split over so many ranks."""
    one_layer = replace(config, num_hidden_layers=1, max_position_embeddings=1)
    with torch.device("meta"):
        Qwen3ForCausalLM(one_layer, torch_attention, TensorParallel(0, size))
