"""Tensor parallel with real processes: 2 and 4 ranks over gloo give what one rank gives, on every
path. float32 on CPU, logits to 1e-4 and greedy tokens equal."""

import multiprocessing
import os
import socket
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, random_ids
from recording import GREEDY, add, assert_logits_agree

from nanovllm import LLM, SamplingParams
from nanovllm.engine import kv_cache, workers
from nanovllm.engine.sequence import Sequence
from nanovllm.tools.forced import TokenPath, run_forced

TEXTS = ["ROMEO:\n", "First Citizen:\nBefore we proceed any further", "KING HENRY", "O", "\n\n"]
# Nothing divides: a vocabulary that is padded, a KV head that is replicated; and biases.
SHAPE = {"vocab_size": 515, "num_key_value_heads": 1, "attention_bias": True}
# A pool of 12 blocks and steps of 16 positions: prompts are cut, and requests preempted.
TIGHT = {"kvcache_block_size": 4, "num_kvcache_blocks": 12, "max_num_batched_tokens": 16}
ROOMY = {"kvcache_block_size": 4, "num_kvcache_blocks": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), **SHAPE, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", **ROOMY) as llm:
        yield llm


@pytest.fixture(scope="module", params=[2, 4])
def split(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(folder, device="cpu", tensor_parallel_size=request.param, **TIGHT) as llm:
        llm.scheduler.learns_headroom = False  # which would leave few to preempt
        yield llm


@pytest.fixture(scope="module")
def bundled(tiny_qwen3: Path) -> Iterator[LLM]:
    """The bundled model on two ranks."""
    with LLM(tiny_qwen3, device="cpu", tensor_parallel_size=2, num_kvcache_blocks=32) as llm:
        yield llm


class Logits:
    """Records the logits from which rank 0 samples: (seq_id, position) -> [vocab]. In the plain
    loop and in the one that runs ahead."""

    def __init__(self, llm: LLM) -> None:
        self.at: dict[tuple[int, int], torch.Tensor] = {}
        self.runner = llm.model_runner
        self._step: list[tuple[int, int]] = []

    def __enter__(self) -> "Logits":
        launch, run_model = self.runner.launch, self.runner.run_model

        def on_launch(seqs: list[Sequence], is_prefill: bool, *args: Any) -> Any:
            self._step = [
                (seq.seq_id, seq.num_cached_tokens + seq.num_scheduled_tokens - 1) for seq in seqs
            ]
            return launch(seqs, is_prefill, *args)

        def on_run_model(inputs: Any) -> torch.Tensor:
            logits = run_model(inputs)
            self.at.update(zip(self._step, logits.clone(), strict=True))
            return logits

        self.runner.launch, self.runner.run_model = on_launch, on_run_model
        return self

    def __exit__(self, *exc_info: object) -> None:
        del self.runner.launch, self.runner.run_model

    def of(self, seq: Sequence) -> dict[int, torch.Tensor]:
        """At the positions that a token of `seq` was sampled from."""
        sampled = range(seq.num_prompt_tokens - 1, seq.num_tokens - 1)
        return {position: self.at[seq.seq_id, position] for position in sampled}


def run(llm: LLM) -> None:
    while not llm._run_ahead.is_idle():
        llm._loop_step()


def complete(
    llm: LLM, prompts: list[list[int]], max_tokens: int, runs_ahead: bool = False
) -> tuple[list[Sequence], list[dict[int, torch.Tensor]]]:
    """Run all prompts together, greedily: their sequences and their logits by position."""
    llm.runs_ahead = runs_ahead
    with Logits(llm) as logits:
        seqs = [add(llm, prompt, max_tokens=max_tokens) for prompt in prompts]
        run(llm)
    return seqs, [logits.of(seq) for seq in seqs]


def assert_as_one_rank(
    what: str, one_rank: LLM, split: LLM, prompts: list[list[int]], max_tokens: int, **loop: bool
) -> None:
    expected, reference = complete(one_rank, prompts, max_tokens)
    seqs, logits = complete(split, prompts, max_tokens, **loop)
    for i, seq in enumerate(seqs):
        assert_logits_agree(f"{what}, prompt {i}", logits[i], reference[i], tolerance=1e-4)
        assert seq.completion_token_ids == expected[i].completion_token_ids, what


# --- equal to one rank ----------------------------------------------------------------------------


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain loop", "ahead"])
def test_case_35_chunked_prefill(one_rank: LLM, split: LLM, runs_ahead: bool) -> None:
    """A prompt of 40 ids in steps of 16 beside a short one, against one step of 43. The vocabulary
    of 515 is padded to 516, the one KV head is on every rank."""
    prompts = [random_ids(40, 515, seed=1), random_ids(3, 515, seed=2)]
    before = split.scheduler.num_steps
    assert_as_one_rank("chunked", one_rank, split, prompts, 4, runs_ahead=runs_ahead)
    assert split.scheduler.num_steps - before >= 6


def test_prefix_hit(one_rank: LLM, split: LLM) -> None:
    """The second prompt takes 20 of its 27 positions from the pool of every rank."""
    first = random_ids(22, 515, seed=3)
    second = first[:20] + random_ids(7, 515, seed=4)
    complete(split, [first], 1)
    before = split.scheduler.num_prefix_hit_tokens
    assert_as_one_rank("prefix", one_rank, split, [second], 6)
    assert split.scheduler.num_prefix_hit_tokens - before == 20


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain loop", "ahead"])
def test_case_19_preempted_and_resumed(one_rank: LLM, split: LLM, runs_ahead: bool) -> None:
    """Six requests that would need 30 blocks of 12: what they generated is prefilled again, and a
    worker never lacks the ids."""
    prompts = [random_ids(count, 515, seed=count) for count in (4, 7, 9, 3, 6, 8)]
    before = split.scheduler.num_preemptions
    assert_as_one_rank("preempted", one_rank, split, prompts, 14, runs_ahead=runs_ahead)
    assert split.scheduler.num_preemptions - before >= 5


def test_requests_that_join_and_end_early(one_rank: LLM, split: LLM) -> None:
    """Running ahead, a request is aborted while its next token is on the way, and another joins:
    the rows that the ranks share move, and all tokens stay those of one rank."""
    prompts = [random_ids(count, 515, seed=count) for count in (5, 2, 4)]
    (_, *expected), _ = complete(one_rank, prompts, 8)
    split.runs_ahead = True
    aborted, stays = (add(split, prompt, max_tokens=8) for prompt in prompts[:2])
    for _ in range(4):
        split._loop_step()
    split.abort(aborted.seq_id)
    joins = add(split, prompts[2], max_tokens=8)
    run(split)
    for seq, reference in zip((stays, joins), expected, strict=True):
        assert seq.completion_token_ids == reference.completion_token_ids


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain loop", "ahead"])
def test_sampling_controls(one_rank: LLM, split: LLM, runs_ahead: bool) -> None:
    """Rank 0 samples for all: seeds, filters, min_tokens and logprobs as on one rank. The ids stay
    below 515: at a temperature that makes all equally likely, the pad would be drawn."""
    params = [
        SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.2, seed=6, top_k=7, top_p=0.9, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1, seed=7, max_tokens=8, min_tokens=8, logprobs=2),
        SamplingParams(temperature=1e9, seed=8, max_tokens=8, ignore_eos=True),
    ]
    prompts = [random_ids(3, 515, seed=i) for i in range(4)]
    one_rank.runs_ahead, split.runs_ahead = False, runs_ahead
    expected = one_rank.generate(prompts, params, use_tqdm=False)
    outputs = split.generate(prompts, params, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [o["token_ids"] for o in expected]
    for ours, theirs in zip(outputs[2]["logprobs"], expected[2]["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain loop", "ahead"])
def test_bundled_model(tiny_qwen3: Path, bundled: LLM, runs_ahead: bool) -> None:
    """Trained weights, texts, EOS: the same completions, token for token."""
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(tiny_qwen3, device="cpu", num_kvcache_blocks=32) as llm:
        expected = llm.generate(TEXTS, params, use_tqdm=False)
    bundled.runs_ahead = runs_ahead
    assert bundled.generate(TEXTS, params, use_tqdm=False) == expected


@pytest.mark.parametrize("forced", [7, 514])
def test_other_tokens_than_were_sampled(one_rank: LLM, split: LLM, forced: int) -> None:
    """A caller of `step`'s parts may accept what it likes: every rank goes on from that."""
    paths = [TokenPath([*random_ids(9, 515, seed=i), *[forced] * 5], 9) for i in range(2)]
    split.runs_ahead = False
    pairs = zip(run_forced(split, paths).logits, run_forced(one_rank, paths).logits, strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


# --- memory and messages --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_tables(folder: Path) -> Iterator[LLM]:
    """Two ranks, of which rank 0 may take 16 MiB for its pool and the other the usual GiB. Blocks
    of one position make the longest tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "CPU_POOL_BYTES", 16 << 20)
        llm = LLM(folder, device="cpu", tensor_parallel_size=2, kvcache_block_size=1)
    with llm:
        yield llm


def test_case_21_all_ranks_take_the_smallest_pool(long_tables: LLM) -> None:
    """A KV head of 16 in float32, K and V, 2 layers: 256 bytes a block on each rank."""
    assert long_tables.model_runner.num_kvcache_blocks == (16 << 20) // 256
    assert len(long_tables.scheduler.block_manager.blocks) == (16 << 20) // 256


def test_a_message_of_any_size(
    folder: Path, long_tables: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill of 300 cached prompts: 300 block tables of 1,003, more than a MiB."""
    sizes: list[int] = []
    dumps = workers.pickle.dumps

    def measured(*args: Any, **kwargs: Any) -> bytes:
        sizes.append(len(data := dumps(*args, **kwargs)))
        return data

    monkeypatch.setattr(workers.pickle, "dumps", measured)
    prefix = random_ids(1000, 515, seed=1)
    prompts = [prefix + random_ids(3, 515, seed=i) for i in range(300)]
    params = SamplingParams(max_tokens=2, **GREEDY)
    outputs = []
    with LLM(folder, device="cpu", kvcache_block_size=1, num_kvcache_blocks=4000) as one_rank:
        for llm in (one_rank, long_tables):
            llm.generate([prefix], params, use_tqdm=False)
            outputs.append(llm.generate(prompts, params, use_tqdm=False))
    assert max(sizes) > 300 * 1000 * 4 > 1 << 20
    assert outputs[0] == outputs[1]


def test_case_21_the_other_rank_has_no_block_more(long_tables: LLM) -> None:
    """It is sent to the block after the last one; rank 0 is not, and goes on. (Ends the engine.)"""
    write = long_tables.model_runner._steps.write

    def beyond(seqs: list[Sequence], is_prefill: bool) -> Any:
        (row,) = write(seqs, is_prefill)
        return [row._replace(block_table=np.int32((16 << 20) // 256).tobytes())]

    long_tables.model_runner._steps.write = beyond
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(.|\n)*IndexError.* out of bounds"):
        long_tables.generate([[1]], use_tqdm=False)


# --- many engines ---------------------------------------------------------------------------------


def test_case_36_engines_side_by_side(bundled: LLM, split: LLM) -> None:
    """In one process, in turns: neither disturbs the other, nor torch's default process group."""
    params = SamplingParams(max_tokens=3, **GREEDY)
    alone = [llm.generate([[1, 2, 3]], params, use_tqdm=False) for llm in (bundled, split)]
    for llm in (bundled, split):
        llm.runs_ahead = False
        llm.add_request([1, 2, 3], params)
    finished: dict[int, list[list[int]]] = {0: [], 1: []}
    while not (bundled.is_finished() and split.is_finished()):
        for i, llm in enumerate((bundled, split)):
            finished[i] += [ids for _, ids in llm.step()[0]]
    assert finished == {i: [outputs[0]["token_ids"]] for i, outputs in enumerate(alone)}
    assert not torch.distributed.is_initialized()


def test_case_36_start_where_names_and_ports_are_taken_and_exit_twice(folder: Path) -> None:
    """The port and the shared-memory name that a relative of this engine would use are taken.
    Afterwards there is no process, no shared memory, no open file more than before."""
    shared_before = set(os.listdir("/dev/shm"))
    children_before = set(multiprocessing.active_children())
    stale = SharedMemory("nanovllm", create=True, size=16)
    try:
        with socket.socket() as busy:
            busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            busy.bind(("127.0.0.1", 2333))
            busy.listen()
            llm = LLM(folder, device="cpu", tensor_parallel_size=2, **ROOMY)
            assert len(set(multiprocessing.active_children()) - children_before) == 1
            files = len(os.listdir("/proc/self/fd"))
            llm.exit()
            llm.exit()
        assert len(os.listdir("/proc/self/fd")) < files
    finally:
        stale.close()
        stale.unlink()
    assert set(multiprocessing.active_children()) == children_before
    assert set(os.listdir("/dev/shm")) == shared_before
    with pytest.raises(RuntimeError, match="this engine has exited"):
        llm.step()
