"""LLMEngine: drives schedule -> run -> postprocess, from prompts to completions."""

import os
import weakref
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from time import perf_counter
from typing import Any, TypedDict

from tqdm import tqdm

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.hf import load_eos_token_ids, load_model_config, load_tokenizer

Prompt = str | list[int]


class Completion(TypedDict):
    """One prompt's result. token_ids: the completion only, a final EOS id included;
    text: token_ids decoded without special tokens; finish_reason: "stop" (EOS) or "length"."""

    text: str
    token_ids: list[int]
    finish_reason: str


class LLMEngine:
    """Owns the tokenizer, the scheduler and the model runner.

    `generate` is the whole loop; `add_request` and `step` are its parts, for callers who drive it
    themselves. Not thread-safe.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        """Start everything. Raises TypeError or ValueError, with nothing left running, for bad
        settings (see Config) or a folder that is not a complete Qwen3 model."""
        config = Config.from_settings(model, settings)
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size={config.tensor_parallel_size}: this version runs on one "
                "GPU; use 1"
            )
        model_config = load_model_config(config.model)
        self.config = replace(
            config, max_model_len=min(config.max_model_len, model_config.max_position_embeddings)
        )
        self.tokenizer = load_tokenizer(config.model)
        self.vocab_size = model_config.vocab_size
        eos_token_ids = load_eos_token_ids(config.model, self.tokenizer)
        self.model_runner = ModelRunner(self.config, model_config)
        # Runs once: by exit(), when the engine is collected, or at interpreter exit.
        self._finalizer = weakref.finalize(self, self.model_runner.call, "exit")
        self.scheduler = Scheduler(self.config, self.model_runner.num_kvcache_blocks, eos_token_ids)

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.exit()

    def exit(self) -> None:
        """End the engine and give its memory back. A second call does nothing."""
        self._finalizer()

    def is_finished(self) -> bool:
        return self.scheduler.is_finished()

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt, text or token ids; it joins at the next step. Returns its `seq_id`.

        Raises TypeError or ValueError, with nothing changed, for a prompt that is empty, has an
        id outside the vocabulary, or leaves no room within max_model_len or the KV pool.
        """
        self._check_running()
        seq = self._make_sequence(prompt, sampling_params)
        self.scheduler.add(seq)
        return seq.seq_id

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step; when it returns, its tokens are accepted.

        Returns (finished, num_tokens): a list of (seq_id, completion_token_ids), and the positions
        computed, positive in prefill and negative in decode (0 if there was nothing to do). If
        the run raises, the step's requests wait again as if it had not been scheduled.
        """
        self._check_running()
        if self.is_finished():
            return [], 0
        seqs, is_prefill = self.scheduler.schedule()
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        try:
            token_ids = self.model_runner.call("run", seqs, is_prefill)
        except BaseException:  # Ctrl-C as well must not leave the scheduler between two steps
            self.scheduler.rollback(seqs)
            raise
        self.scheduler.postprocess(seqs, token_ids, is_prefill)
        finished = [(seq.seq_id, seq.completion_token_ids) for seq in seqs if seq.is_finished]
        return finished, num_tokens if is_prefill else -num_tokens

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete all prompts; results are in their order.

        prompts: a list of texts and token-id lists, or one text.
        sampling_params: one for all (None: the defaults), or a list with one for each.

        Raises TypeError or ValueError before any prompt is added if one of them is bad (see
        `add_request`). If a step fails, this call's requests are dropped, the error goes on to
        the caller, and the engine can be used again.
        """
        self._check_running()
        seqs = self._make_sequences(prompts, sampling_params)
        for seq in seqs:
            self.scheduler.add(seq)
        try:
            self._run_until_finished(seqs, use_tqdm)
        except BaseException:
            for seq in seqs:
                self.scheduler.abort(seq)
            raise
        return [
            Completion(
                text=self.tokenizer.decode(seq.completion_token_ids, skip_special_tokens=True),
                token_ids=seq.completion_token_ids,
                finish_reason=seq.finish_reason,
            )
            for seq in seqs
        ]

    def _run_until_finished(self, seqs: list[Sequence], use_tqdm: bool) -> None:
        left = {seq.seq_id for seq in seqs}
        speed = {True: 0.0, False: 0.0}  # tok/s of the latest prefill and decode step
        with tqdm(total=len(seqs), desc="Generating", disable=not use_tqdm) as bar:
            while left:
                start = perf_counter()
                finished, num_tokens = self.step()
                speed[num_tokens > 0] = abs(num_tokens) / (perf_counter() - start)
                bar.set_postfix(
                    {"Prefill": f"{speed[True]:.0f}tok/s", "Decode": f"{speed[False]:.0f}tok/s"},
                    refresh=False,
                )
                done = left.intersection(seq_id for seq_id, _ in finished)
                left -= done
                bar.update(len(done))

    def _make_sequences(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None,
    ) -> list[Sequence]:
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise TypeError(f"prompts must be a list of texts or token-id lists, got {prompts!r}")
        if not prompts:
            raise ValueError("prompts is empty: give at least one prompt")
        if isinstance(sampling_params, (list, tuple)):
            if len(sampling_params) != len(prompts):
                raise ValueError(
                    f"{len(prompts)} prompts but {len(sampling_params)} sampling_params: give one "
                    "for all, or one for each"
                )
        else:
            sampling_params = [sampling_params] * len(prompts)
        seqs = []
        for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            try:
                seq = self._make_sequence(prompt, params)
                self.scheduler.check(seq)
            except (TypeError, ValueError) as error:
                raise type(error)(f"prompt {i}: {error}") from error
            seqs.append(seq)
        return seqs

    def _make_sequence(self, prompt: Prompt, sampling_params: SamplingParams | None) -> Sequence:
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {sampling_params!r}")
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
            if not token_ids:
                raise ValueError(f"the prompt {prompt!r} tokenizes to nothing: give some text")
        else:
            token_ids = prompt
        # Texts too: a tokenizer that came with another model may know more ids than this one.
        token_ids = self._checked_ids(token_ids)
        return Sequence(token_ids, sampling_params, self.config.kvcache_block_size)

    def _checked_ids(self, prompt: AbstractSequence[int]) -> list[int]:
        if not isinstance(prompt, (list, tuple)):
            raise TypeError(f"a prompt must be text or a list of token ids, got {prompt!r}")
        if not prompt:
            raise ValueError("the prompt has no token ids: give at least one")
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TypeError(f"token ids must be ints, got {token_id!r}")
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"token id {token_id} is outside the vocabulary 0..{self.vocab_size - 1}"
                )
        return list(prompt)

    def _check_running(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this engine has exited: build a new one")
