"""LLMEngine: drives schedule -> run -> postprocess, from prompts to completions."""

import gc
import os
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.lead_runner import LeadRunner
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.progress_bar import ProgressBar
from nanovllm.engine.prompts import (
    Conversation,
    Prompt,
    check_ids,
    checked_params,
    paired,
    render_chat,
    token_ids_of,
)
from nanovllm.engine.request import Completion, Increment, Request
from nanovllm.engine.run_ahead import RunAhead, StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.hf import load_eos_token_ids, load_model_config, load_tokenizer
from nanovllm.utils.interrupts import collector_held, interrupts_held


class LLMEngine:
    """Owns the tokenizer, the scheduler and the model runner.

    `generate`, `chat` and `stream` are whole loops; `add_request`, `step` and `abort` are their
    parts, for callers who drive it themselves. Not thread-safe.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        """Start everything. Raises TypeError or ValueError, with nothing left running, for bad
        settings (see Config) or a folder that is not a complete Qwen3 model."""
        config = Config.from_settings(model, settings)
        model_config = load_model_config(config.model)
        max_model_len = min(config.max_model_len, model_config.max_position_embeddings)
        self.config = replace(config, max_model_len=max_model_len)
        model_config = replace(model_config, max_position_embeddings=max_model_len)  # RoPE's table
        self.tokenizer = load_tokenizer(config.model)
        self.vocab_size = model_config.vocab_size
        eos_token_ids = load_eos_token_ids(config.model, self.tokenizer)
        runner_type = ModelRunner if config.tensor_parallel_size == 1 else LeadRunner
        try:
            self.model_runner = runner_type(self.config, model_config, eos_token_ids)
        except BaseException as error:
            # The next start needs the memory. Frames hold the model, parameters their loaders.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            raise
        # Runs once: by exit(), when the engine is collected, or at interpreter exit.
        self._finalizer = weakref.finalize(self, self.model_runner.call, "exit")
        if hasattr(os, "fork"):  # in a fork the ranks, their pipes and the GPU are its parent's
            os.register_at_fork(after_in_child=self._finalizer.detach)
        scheduler = Scheduler(self.config, self.model_runner.num_kvcache_blocks, eos_token_ids)
        self._run_ahead = RunAhead(scheduler, self.model_runner)
        self.requests: dict[int, Request] = {}  # the live ones, by seq_id
        self._unreported: dict[int, list[int]] = {}  # ends that `step` has to tell
        # Whole loops run a step ahead where that hides the host's work behind the GPU's.
        self.runs_ahead = self.model_runner.device.type == "cuda"

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.exit()

    @property
    def scheduler(self) -> Scheduler:
        """May be exchanged while no request is live."""
        return self._run_ahead.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler) -> None:
        self._run_ahead.scheduler = scheduler

    def exit(self) -> None:
        """End the engine and give its memory back. A second call does nothing."""
        with interrupts_held():  # a finalizer that was left halfway does not run again
            self._finalizer()

    def is_finished(self) -> bool:
        """Whether `step` has nothing left to run, and nothing to tell."""
        return self._run_ahead.is_idle() and not self._unreported

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt, text or token ids; it joins at the next step. Returns its `seq_id`,
        under which `step` reports its end, also one that comes during a `generate`.

        Raises TypeError or ValueError, with nothing changed, for a prompt that is empty, has an
        id outside the vocabulary, or leaves no room within max_model_len or the KV pool.
        """
        self._check_running()
        seq = self._make_seq(prompt, checked_params(sampling_params))
        self._add([Request(seq, self.tokenizer)])
        return seq.seq_id

    def abort(self, request_id: int) -> bool:
        """End a request (the `seq_id` from `add_request`) and free its blocks; its finish reason is
        "abort". False if it is not live: finished, aborted before, or never added."""
        with interrupts_held():
            request = self.requests.pop(request_id, None)
            if request is None:
                return False
            self.scheduler.abort(request.seq)
            request.report()
            return True

    def step(self) -> StepResult:
        """Run one step; when it returns, its tokens are accepted.

        Returns (finished, num_tokens): a list of (seq_id, completion_token_ids), and the positions
        computed, positive in prefill and negative in decode (0 if there was nothing to do). If
        the run raises, the step's requests wait again as if it had not been scheduled.
        """
        self._check_running()
        finished, num_tokens = self._plain_step()
        ends, self._unreported = self._unreported | dict(finished), {}
        return list(ends.items()), num_tokens

    def _loop_step(self) -> StepResult:
        """A step of the whole loops, which run ahead on a GPU: the result may be that of the step
        before, or ([], 0)."""
        self._check_running()
        return self._run_ahead.step(self._on_tokens) if self.runs_ahead else self._plain_step()

    def _plain_step(self) -> StepResult:
        if self._run_ahead.in_flight is not None:  # of a stream whose caller now steps by hand
            return self._run_ahead.drain(self._on_tokens)
        if self.scheduler.is_finished():
            return [], 0
        seqs: list[Sequence] = []
        try:
            with collector_held():
                with interrupts_held():
                    seqs, is_prefill = self.scheduler.schedule()
                num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
                token_ids = self.model_runner.call("run", seqs, is_prefill)
                with interrupts_held():
                    accepted = self.scheduler.postprocess(seqs, token_ids, is_prefill)
                    self._on_tokens(accepted, self.model_runner.logprobs)
                    finished = [(s.seq_id, s.completion_token_ids) for s in seqs if s.is_finished]
                    seqs = []  # nothing to roll back
        except BaseException:  # Ctrl-C as well must not leave the scheduler between two steps
            with interrupts_held():
                self.scheduler.rollback(seqs)
            raise
        return finished, num_tokens if is_prefill else -num_tokens

    def _on_tokens(
        self, accepted: list[tuple[Sequence, int]], logprobs: dict[int, dict[int, float]]
    ) -> None:
        """Tell the requests what their sequences accepted."""
        for seq, token_id in accepted:
            request = self.requests.get(seq.seq_id)  # None: added to the scheduler by hand
            if request is not None and request.accept(token_id, logprobs.get(seq.seq_id)):
                self.scheduler.finish(seq, "stop")
            if seq.is_finished:
                self.requests.pop(seq.seq_id, None)
                if request is not None and request.index is None:
                    self._unreported[seq.seq_id] = seq.completion_token_ids

    def generate(
        self,
        prompts: str | list[Prompt],
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
        requests = self._make_requests(paired(prompts, sampling_params))
        left = {request.seq.seq_id: request for request in requests}
        completions = {}
        try:
            self._add(requests)
            with closing(ProgressBar(len(requests), self.scheduler, use_tqdm)) as bar:
                while left and not self._run_ahead.is_idle():  # idle, some left: they were aborted
                    finished, num_tokens = self._loop_step()
                    done = [seq_id for seq_id, _ in finished if seq_id in left]
                    # Now, while the next step runs on the GPU: all texts together take longer.
                    completions |= {seq_id: left.pop(seq_id).completion() for seq_id in done}
                    bar.update(len(done), num_tokens)
        finally:
            self._end_loop(requests)
        return [completions.get(request.seq.seq_id) or request.completion() for request in requests]

    def chat(
        self,
        conversations: Conversation | list[Conversation],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[Completion]:
        """`generate` on conversations rendered by the tokenizer's chat template.

        conversations: messages ({"role": ..., "content": ...}), or a list of such lists.
        chat_template_kwargs: what the template takes beside, as {"enable_thinking": False}.
        Raises ValueError if there is no template or one refuses a conversation, TypeError for
        another shape; for the rest see `generate`.
        """
        prompts = render_chat(
            conversations, self.tokenizer, add_generation_prompt, chat_template_kwargs
        )
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: str | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> Iterator[Increment]:
        """As `generate`, but yield each prompt's text and ids as they come.

        Text comes in whole characters, and only what no stop string can still cut. A request that
        is aborted ends with the finish reason "abort". Bad input raises here, at once. Closing the
        iterator, or an exception in the caller's loop, drops what is not finished.
        """
        self._check_running()
        news: deque[Request] = deque()
        return self._stream(self._make_requests(paired(prompts, sampling_params), news), news)

    def _stream(self, requests: list[Request], news: deque[Request]) -> Iterator[Increment]:
        try:
            self._add(requests)
            num_left = len(requests)
            while num_left:
                if not news:  # another caller's steps may have brought some
                    self._loop_step()
                    if self._run_ahead.is_idle():  # all ended, maybe in a step that told nobody
                        news.extend(requests)
                while news:
                    increment = news.popleft().increment()
                    if increment is not None:
                        num_left -= increment["finish_reason"] is not None
                        yield increment
        finally:
            self._end_loop(requests)

    def stats(self) -> dict[str, int | float]:
        """Counters since start, and the state now.

        steps, prefill_tokens and decode_tokens (positions computed), prefix_hit_tokens (positions
        taken from the pool instead), preemptions, graph_replays and graph_misses (decode steps
        with and without a CUDA graph); waiting and running (queue lengths), kv_blocks,
        kv_blocks_used, kv_usage (their share, 0 to 1).
        """
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        return {
            "steps": scheduler.num_steps,
            "prefill_tokens": scheduler.num_prefill_tokens,
            "decode_tokens": scheduler.num_decode_tokens,
            "prefix_hit_tokens": scheduler.num_prefix_hit_tokens,
            "preemptions": scheduler.num_preemptions,
            "graph_replays": self.model_runner.num_graph_replays,
            "graph_misses": self.model_runner.num_graph_misses,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "kv_blocks": len(manager.blocks),
            "kv_blocks_used": len(manager.used_block_ids),
            "kv_usage": len(manager.used_block_ids) / len(manager.blocks),
        }

    def _make_requests(
        self, pairs: list[tuple[Prompt, SamplingParams]], news: deque[Request] | None = None
    ) -> list[Request]:
        requests = []
        for i, (prompt, params) in enumerate(pairs):
            try:
                requests.append(Request(self._make_seq(prompt, params), self.tokenizer, i, news))
            except (TypeError, ValueError) as error:
                raise type(error)(f"prompt {i}: {error}") from error
        return requests

    def _make_seq(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        check_ids(params.stop_token_ids, self.vocab_size, "stop token id")
        token_ids = token_ids_of(prompt, self.tokenizer, self.vocab_size)
        seq = Sequence(token_ids, params, self.config.kvcache_block_size)
        self.scheduler.check(seq)
        return seq

    def _add(self, requests: list[Request]) -> None:
        with interrupts_held():
            for request in requests:
                self.scheduler.add(request.seq)
                self.requests[request.seq.seq_id] = request

    def _end_loop(self, requests: list[Request]) -> None:
        """Drop those of `requests` that have not finished, and leave no step in flight."""
        with interrupts_held():
            for request in requests:
                self.abort(request.seq.seq_id)
        self._run_ahead.drain(self._on_tokens)

    def _check_running(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(
                "this engine has exited (or is the parent process's): build a new one"
            )
        self.model_runner.call("check")
