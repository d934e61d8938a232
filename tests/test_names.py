"""The names by which articles, courses and notebooks look into a running nano-vLLM engine: each is
used here as they use it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from checkpoints import make_checkpoint, random_ids

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.engine import kv_cache
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.attention import Attention
from nanovllm.utils.context import get_context

TWO = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """The very call of the articles, on a model with 1,024 positions, on the CPU; its pool, which
    nothing in the call bounds there, made 32 blocks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kv_cache, "CPU_POOL_BYTES", 4 << 20)
    path = str(make_checkpoint(tmp_path, vocab_size=1024, max_position_embeddings=1024))
    llm = LLM(
        path,
        enforce_eager=True,
        tensor_parallel_size=1,
        max_model_len=1024,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        kvcache_block_size=256,
        gpu_memory_utilization=0.5,
    )
    yield llm
    llm.exit()


def test_the_public_surface() -> None:
    assert nanovllm.__all__ == ["LLM", "SamplingParams"]
    assert all(hasattr(nanovllm, name) for name in nanovllm.__all__)


def test_generate_with_one_or_a_list_of_params(llm: LLM) -> None:
    outputs = llm.generate([[100, 200, 300], [400]], TWO, use_tqdm=False)
    again = llm.generate([[100, 200, 300], [400]], [TWO, TWO], use_tqdm=False)
    assert outputs == again
    assert [len(output["token_ids"]) for output in outputs] == [2, 2]
    assert all(isinstance(output["text"], str) for output in outputs)


def test_the_scheduler_of_a_running_engine(llm: LLM) -> None:
    scheduler, manager = llm.scheduler, llm.scheduler.block_manager
    num_blocks = len(manager.blocks)
    assert num_blocks == 32
    assert len(manager.free_block_ids) == num_blocks and len(manager.used_block_ids) == 0
    assert llm.tokenizer.encode("my lord")

    llm.add_request([100, 200, 300], TWO)
    assert (len(scheduler.waiting), len(scheduler.running)) == (1, 0)
    seq = scheduler.waiting[0]
    assert not llm.is_finished()
    assert llm.step() == ([], 3)
    assert (len(scheduler.waiting), list(scheduler.running)) == (0, [seq])
    assert seq.num_completion_tokens == 1, "the step's token is accepted when it returns"
    assert list(manager.used_block_ids) == seq.block_table == [0]
    assert list(manager.free_block_ids) == [*range(1, num_blocks)]
    assert llm.step() == ([(seq.seq_id, seq.completion_token_ids)], -1)
    assert llm.is_finished()
    assert len(manager.free_block_ids) == num_blocks


def test_the_loop_written_out(llm: LLM) -> None:
    """schedule, call("run"), postprocess: what `step` does, by hand."""
    (expected,) = llm.generate([[100, 200, 300]], TWO, use_tqdm=False)
    scheduler = llm.scheduler
    seq = Sequence([100, 200, 300], TWO)
    scheduler.add(seq)
    phases = []
    while not llm.is_finished():
        seqs, is_prefill = scheduler.schedule()
        assert seqs == [seq]
        token_ids = llm.model_runner.call("run", seqs, is_prefill)
        assert len(token_ids) == 1 and isinstance(token_ids[0], int)
        scheduler.postprocess(seqs, token_ids, is_prefill)
        phases.append(is_prefill)
    assert phases == [True, False]
    assert seq.is_finished and seq.completion_token_ids == expected["token_ids"]


def test_preempt_by_hand(llm: LLM) -> None:
    (expected,) = llm.generate([[100, 200, 300]], TWO, use_tqdm=False)
    llm.add_request([100, 200, 300], TWO)
    llm.step()
    seq = llm.scheduler.running.popleft()
    llm.scheduler.preempt(seq)
    assert list(llm.scheduler.waiting) == [seq]
    assert (seq.status.name, seq.num_cached_tokens, seq.block_table) == ("WAITING", 0, [])
    while not llm.is_finished():
        llm.step()
    assert seq.completion_token_ids == expected["token_ids"]


def test_a_sequence_from_two_arguments() -> None:
    prompt = random_ids(257)
    params = SamplingParams(temperature=0.5, max_tokens=7, ignore_eos=True)
    seq = Sequence(prompt, params)
    other = Sequence([1], params)
    assert other.seq_id > seq.seq_id
    assert (seq.token_ids, seq.last_token, len(seq)) == (prompt, prompt[-1], 257)
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_completion_tokens) == (257, 257, 0)
    assert (seq.num_cached_tokens, seq.num_scheduled_tokens, seq.block_table) == (0, 0, [])
    assert (seq.status.name, seq.is_finished) == ("WAITING", False)
    assert (seq.temperature, seq.max_tokens, seq.ignore_eos) == (0.5, 7, True)
    assert (seq.num_blocks, seq.last_block_num_tokens) == (2, 1)
    assert (seq.block(0), seq.block(1)) == (prompt[:256], prompt[256:])
    assert (seq.prompt_token_ids, seq.completion_token_ids) == (prompt, [])


def test_a_block_manager_of_its_own() -> None:
    """BlockManager(num_blocks, block_size) without an engine: allocate, fill, share, append."""
    manager = BlockManager(4, 256)
    prompt = random_ids(512)
    first = Sequence(prompt, SamplingParams())
    assert manager.can_allocate(first) == 0
    manager.allocate(first, 0)
    assert first.block_table == [0, 1]
    assert list(manager.free_block_ids) == [2, 3] and manager.used_block_ids == {0, 1}
    first.num_scheduled_tokens = 512
    manager.hash_blocks(first)
    first.num_cached_tokens, first.num_scheduled_tokens = 512, 0
    digest = BlockManager.compute_hash(prompt[:256])
    chained = BlockManager.compute_hash(prompt[256:], digest)
    assert manager.hash_to_block_id == {digest: 0, chained: 1}
    assert [block.hash for block in manager.blocks[:2]] == [digest, chained]

    second = Sequence([*prompt, 1, 2, 3], SamplingParams())
    assert manager.can_allocate(second) == 2
    manager.allocate(second, 2)
    assert second.block_table == [0, 1, 2] and second.num_cached_tokens == 512
    assert [block.ref_count for block in manager.blocks] == [2, 2, 1, 0]

    first.append_token(9)  # 513 tokens: it opens a block
    assert manager.can_append(first)
    manager.may_append(first)
    assert first.block_table == [0, 1, 3]
    assert manager.can_allocate(Sequence([7], SamplingParams())) == -1
    manager.deallocate(second)
    assert [block.ref_count for block in manager.blocks] == [1, 1, 0, 1]
    assert second.block_table == [] and list(manager.free_block_ids) == [2]


def test_compute_hash_is_xxh64_of_the_chain() -> None:
    ids = [1, 2**40]
    content = b"".join(i.to_bytes(8, "little") for i in ids)
    assert BlockManager.compute_hash(ids) == xxhash.xxh64_intdigest(content)
    assert BlockManager.compute_hash(ids, prefix=-1) == xxhash.xxh64_intdigest(content)
    before = (77).to_bytes(8, "little")
    assert BlockManager.compute_hash(ids, prefix=77) == xxhash.xxh64_intdigest(before + content)


def test_get_context_inside_a_step(llm: LLM) -> None:
    """A hook on any attention layer can read all of it."""
    names = "is_prefill cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k slot_mapping"
    seen: list[dict[str, object]] = []

    def hook(*_: object) -> None:
        context = get_context()
        fields = [*names.split(), "context_lens", "block_tables"]
        seen.append({name: getattr(context, name) for name in fields})

    model = llm.model_runner.model
    attention = [module for module in model.modules() if isinstance(module, Attention)]
    assert len(attention) == 2
    attention[-1].register_forward_hook(hook)
    llm.generate([[100, 200, 300]], TWO, use_tqdm=False)
    prefill, decode = seen
    assert prefill["is_prefill"] and not decode["is_prefill"]
    assert prefill["cu_seqlens_q"].tolist() == prefill["cu_seqlens_k"].tolist() == [0, 3]
    assert prefill["max_seqlen_q"] == prefill["max_seqlen_k"] == 3
    assert prefill["slot_mapping"].tolist() == [0, 1, 2]
    assert decode["slot_mapping"].tolist() == [3]
    assert decode["context_lens"].tolist() == [4]
    assert decode["block_tables"].tolist() == [[0]]
