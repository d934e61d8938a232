"""Equivalences: every way in which the engine computes something, against a plainer one.

The same tokens go through both, and the logits are compared. What rounding may do is measured, not
guessed: an error is tolerated up to three times the one that transformers makes in the same dtype
on the same tokens, against its own run in the next wider one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.tools.comparison import NotRun, Numbers, Row, Tolerance, compare, measured
from nanovllm.tools.forced import Run, TokenPath, run_forced
from nanovllm.tools.kernels import kernel_rows

NUM_TOKENS = 8  # that each path decodes


class Equivalences:
    """The comparisons for one model folder on one device in one dtype.

    `base` is the engine as it comes: graphs where it has them, all paths in one batch, room for
    everything. It is compared with transformers; what is made differently is compared with it.
    """

    def __init__(
        self, folder: str, device: str = "auto", dtype: str = "auto", tp_sizes: Collection[int] = ()
    ) -> None:
        """Starts the base engine. tp_sizes: tensor-parallel sizes to compare also on the CPU, where
        each rank is one more process. Raises ValueError as LLM does."""
        self.folder, self.tp_sizes = folder, tp_sizes
        self._open = ExitStack()
        on_cuda = device != "cpu" and torch.cuda.is_available()
        self.block_size = 256 if on_cuda else 16  # what flash-attn needs
        self.settings = {
            "device": device,
            "dtype": dtype,
            "kvcache_block_size": self.block_size,
            "num_kvcache_blocks": 32,
            "max_num_batched_tokens": 16 * self.block_size,
            "max_model_len": 4 * self.block_size,
            "max_num_seqs": 8,
        }
        self.base = self._open.enter_context(LLM(folder, **self.settings))
        self.device, self.dtype = self.base.model_runner.device, self.base.model_runner.dtype

    def __enter__(self) -> Equivalences:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def about(self) -> dict[str, str]:
        """What was compared on what."""
        import transformers

        on_cuda = self.device.type == "cuda"
        return {
            "model": self.folder,
            "device": torch.cuda.get_device_name(self.device) if on_cuda else "cpu",
            "dtype": _name(self.dtype),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def rows(self) -> Iterator[Row]:
        """Make each comparison; an exception in one of them is its failure."""
        yield self._row("this engine", "transformers", self._transformers)
        yield self._row("KV cache", "full recomputation", self._recomputation)
        yield self._row("chunked prefill", "whole prefill", self._chunked)
        yield self._row("prefix hit", "cold", self._prefix_hit)
        yield self._row("preempted and resumed", "never preempted", self._preempted)
        yield from self.graph_rows()
        for size in sorted({2, 4, *self.tp_sizes}):
            yield self._row(f"TP={size}", "TP=1", lambda size=size: self._tensor_parallel(size))
        yield from kernel_rows(self.base)
        yield self._row("batched with others", "alone", lambda: (self.plain, self.alone))

    def graph_rows(self) -> Iterator[Row]:
        """Those about CUDA graphs."""
        yield self._row("CUDA graph, prefill", "eager", self._prefill_graphs)
        yield self._row("CUDA graph, decode", "eager", self._decode_graphs)

    def _row(
        self, optimized: str, reference: str, run: Callable[[], tuple[Numbers, Numbers]]
    ) -> Row:
        return compare(optimized, reference, lambda: (*run(), self.tolerance))

    # --- what is compared ---

    @cached_property
    def texts(self) -> list[list[int]]:
        """Ids that the model itself finds likely: what it says at temperature 1."""
        length = 2 * self.block_size + 2 + NUM_TOKENS
        params = [
            SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, seed=seed)
            for seed in range(5)
        ]
        starts = [[seed + 1] for seed in range(5)]
        outputs = self.base.generate(starts, params, use_tqdm=False)
        return [s + out["token_ids"] for s, out in zip(starts, outputs, strict=True)]

    @cached_property
    def paths(self) -> list[TokenPath]:
        """Prompts on both sides of block boundaries."""
        size = self.block_size
        lengths = (1, size - 1, size, size + 1, 2 * size + 3)
        return [self._path(i, length) for i, length in enumerate(lengths)]

    def _path(self, text: int, num_prompt: int) -> TokenPath:
        return TokenPath(self.texts[text][: num_prompt + NUM_TOKENS], num_prompt)

    @cached_property
    def plain(self) -> Numbers:
        return run_forced(self.base, self.paths).logits

    @cached_property
    def alone(self) -> Numbers:
        return [run_forced(self.base, [path]).logits[0] for path in self.paths]

    @cached_property
    def reference(self) -> tuple[Numbers, Numbers]:
        """transformers' logits of the paths, in this dtype and in the next wider one."""
        import transformers

        transformers.utils.logging.disable_progress_bar()
        model = transformers.Qwen3ForCausalLM.from_pretrained(self.folder, local_files_only=True)
        model.eval().to(self.device)
        exact = self._reference_logits(model, _wider(self.dtype))
        return self._reference_logits(model, self.dtype), exact

    @torch.inference_mode()
    def _reference_logits(self, model: Any, dtype: torch.dtype) -> Numbers:
        # Not model.to(dtype): that would round the frequencies of RoPE as well.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        logits = []
        for ids, num_prompt in self.paths:
            every = model(torch.tensor([ids[:-1]], device=self.device)).logits[0]
            logits.append(every[num_prompt - 1 :].clone())
        return logits

    @cached_property
    def tolerance(self) -> Tolerance:
        dtype, wider = _name(self.dtype), _name(_wider(self.dtype))
        source = f"transformers' own {dtype} error, against its {wider} run"
        return measured(*self.reference, source)

    # --- comparisons: (optimized, reference) ---

    def _transformers(self) -> tuple[Numbers, Numbers]:
        return self.plain, self.reference[1]

    def _recomputation(self) -> tuple[Numbers, Numbers]:
        """The longest path: every token from a prefill of all that precedes it."""
        ids, num_prompt = self.paths[-1]
        ends = range(num_prompt, len(ids))
        steps = [run_forced(self.base, [TokenPath(ids[: end + 1], end)]) for end in ends]
        computed = [step.gained["prefill_tokens"] for step in steps]
        _require(computed == list(ends), f"{computed} positions were computed")
        return self.alone[-1:], [torch.cat([step.logits[0] for step in steps])]

    def _chunked(self) -> tuple[Numbers, Numbers]:
        """A budget that is no divisor of any length."""
        run = self._other_engine(self.paths, max_num_batched_tokens=self.block_size + 5)
        _require(run.gained["cuts"] > 0, "no prompt was cut")
        return run.logits, self.plain

    def _prefix_hit(self) -> tuple[Numbers, Numbers]:
        """The longest path after another one with the same first two blocks."""
        (ids, num_prompt), shared = self.paths[-1], 2 * self.block_size
        donor = TokenPath(ids[:shared] + self.texts[0][shared:], num_prompt)
        run_forced(self.base, [donor])
        run = run_forced(self.base, self.paths[-1:], cold=False)
        hit = run.gained["prefix_hit_tokens"]
        _require(hit == shared, f"{hit} positions were hit, not {shared}")
        return run.logits, self.alone[-1:]

    def _preempted(self) -> tuple[Numbers, Numbers]:
        """Three requests that outgrow a pool of four blocks while they decode."""
        paths = [self._path(i, self.block_size - 3) for i in range(3)]
        run = self._other_engine(paths, num_kvcache_blocks=4)
        _require(run.gained["preemptions"] > 0, "nothing was preempted")
        return run.logits, run_forced(self.base, paths).logits

    @cached_property
    def _graph_and_eager(self) -> list[tuple[Run, Run]]:
        """Batches that leave rows or positions of a graph unused or use them all; those after the
        first are short enough for prefill graphs."""
        if self.base.model_runner.graphs is None:
            raise NotRun(f"CUDA graphs need a GPU and triton, the device is {self.device.type}")
        batches = [self.paths, self.paths[:1], self.paths[:3:2], self.paths[:3]]
        graph = [run_forced(self.base, batch) for batch in batches]
        # What the graphs themselves sampled, from logits that nobody sees.
        worst = max(run.shortfall for run in graph)
        if worst > self.tolerance.max_abs:
            raise RuntimeError(f"a graph sampled a token {worst:.1e} below the best")
        with LLM(self.folder, **self.settings, enforce_eager=True) as llm:
            return list(zip(graph, (run_forced(llm, batch) for batch in batches), strict=True))

    def _prefill_graphs(self) -> tuple[Numbers, Numbers]:
        pairs = self._graph_and_eager[1:]
        if self.base.model_runner.prefill_graphs is None:
            raise NotRun("prefill attention is plain torch, which no graph can hold")
        _require(all(run.gained["prefill_replays"] for run, _ in pairs), "a prefill had no graph")
        return _logits(pairs, slice(0, 1))

    def _decode_graphs(self) -> tuple[Numbers, Numbers]:
        pairs = self._graph_and_eager
        _require(not any(run.gained["graph_misses"] for run, _ in pairs), "a decode had no graph")
        return _logits(pairs, slice(1, None))

    def _tensor_parallel(self, size: int) -> tuple[Numbers, Numbers]:
        if self.device.type == "cuda" and torch.cuda.device_count() < size:
            raise NotRun(f"{size} GPUs are needed, there are {torch.cuda.device_count()}")
        if self.device.type == "cpu" and size not in self.tp_sizes:
            raise NotRun(f"on the CPU only with --tp {size}")
        # Without graphs: see run_forced.
        settings = {"tensor_parallel_size": size, "enforce_eager": True}
        try:
            return self._other_engine(self.paths, **settings).logits, self.plain
        except ValueError as error:  # the model cannot be split so, or not at all here
            if size in self.tp_sizes:  # which was asked for by name
                raise
            raise NotRun(str(error)) from error

    def _other_engine(self, paths: list[TokenPath], **settings: Any) -> Run:
        with LLM(self.folder, **{**self.settings, **settings}) as llm:
            return run_forced(llm, paths)


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _require(condition: bool, otherwise: str) -> None:
    """A comparison that did not exercise what it is about must not pass."""
    if not condition:
        raise RuntimeError(f"the comparison missed its point: {otherwise}")


def _logits(pairs: list[tuple[Run, Run]], tokens: slice) -> tuple[Numbers, Numbers]:
    """Of both runs of each pair, the logits of some of each path's completion tokens."""
    graph, eager = (
        [logits[tokens] for run in runs for logits in run.logits]
        for runs in zip(*pairs, strict=True)
    )
    return graph, eager
