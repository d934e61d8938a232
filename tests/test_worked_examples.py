"""The engine's worked examples, end to end: a real LLM on CPU, watched from inside each step.

T/C is total/cached after the step. Prompts are random ids below 701; vocabulary 1024. The example
"cache equivalence" is in test_equivalence.py.
"""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from checkpoints import random_ids as random_ids_below
from recording import Watch, add, progress

from nanovllm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(folder, vocab_size=1024, max_position_embeddings=1024)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random_ids_below(count, 701, seed)


def start(folder: Path, **settings: Any) -> Watch:
    """An engine of 32 blocks of 256 unless `settings` say otherwise, watched."""
    return Watch(LLM(folder, device="cpu", **{"num_kvcache_blocks": 32, **settings}))


def put_first(llm: LLM, *block_ids: int) -> None:
    """Let the next blocks drawn from the free queue be these."""
    for block_id in reversed(block_ids):
        llm.scheduler.block_manager.free_block_ids.move_to_end(block_id, last=False)


def ref_counts(llm: LLM, block_ids: list[int]) -> list[int]:
    return [llm.scheduler.block_manager.blocks[i].ref_count for i in block_ids]


def test_a_one_request(folder: Path) -> None:
    """Ids [100, 200, 300], max_tokens 3: one prefill and two decode steps."""
    watch = start(folder)
    seq = add(watch.llm, [100, 200, 300], max_tokens=3)

    step = watch.step()
    assert step.context.is_prefill
    assert step.input_ids == [100, 200, 300]
    assert step.positions == [0, 1, 2]
    assert step.logits.shape == (1, 1024)
    assert (step.finished, step.num_tokens) == ([], 3)
    assert progress(seq) == "4/3"

    step = watch.step()
    assert not step.context.is_prefill
    assert step.input_ids == [seq.token_ids[3]]
    assert step.positions == [3]
    assert step.context.context_lens.tolist() == [4]
    assert (step.finished, step.num_tokens) == ([], -1)
    assert progress(seq) == "5/4"

    step = watch.step()
    assert step.positions == [4]
    assert step.context.context_lens.tolist() == [5]
    assert step.finished == [(seq.seq_id, seq.completion_token_ids)]
    assert step.num_tokens == -1
    assert (seq.num_tokens, seq.num_completion_tokens) == (6, 3)
    assert (seq.status.name, seq.num_cached_tokens, seq.block_table) == ("FINISHED", 0, [])
    assert watch.llm.is_finished()


def test_b_two_requests(folder: Path) -> None:
    """Lengths 3 and 4, max_tokens 2 and 5: five steps, and each block comes back in its step."""
    watch = start(folder, max_num_seqs=2)
    r1 = add(watch.llm, [1, 2, 3], max_tokens=2)
    r2 = add(watch.llm, [4, 5, 6, 7], max_tokens=5)

    step = watch.step()
    assert step.num_tokens == 7
    assert step.input_ids == [1, 2, 3, 4, 5, 6, 7]
    assert (progress(r1), progress(r2)) == ("4/3", "5/4")

    step = watch.step()
    assert step.seqs == [r1, r2]
    assert step.finished == [(r1.seq_id, r1.completion_token_ids)]
    assert (r1.num_completion_tokens, progress(r2)) == (2, "6/5")

    rest = watch.run()
    assert [step.seqs for step in rest] == [[r2]] * 3
    assert rest[-1].finished == [(r2.seq_id, r2.completion_token_ids)]
    assert r2.num_completion_tokens == 5
    assert [step.num_tokens for step in watch.steps] == [7, -2, -1, -1, -1]
    assert [step.num_free_blocks for step in watch.steps] == [30, 31, 31, 31, 32]


def test_b_max_num_seqs_1_caps_the_step_not_the_live_requests(folder: Path) -> None:
    """Seven steps: prefill R1, prefill R2, decode R1 (finishes), decode R2 four times."""
    watch = start(folder, max_num_seqs=1)
    r1 = add(watch.llm, [1, 2, 3], max_tokens=2)
    r2 = add(watch.llm, [4, 5, 6, 7], max_tokens=5)
    steps = watch.run()
    assert [step.seqs for step in steps] == [[r1], [r2], [r1], [r2], [r2], [r2], [r2]]
    assert [step.num_tokens for step in steps] == [3, 4, -1, -1, -1, -1, -1]
    assert [seq_id for seq_id, _ in steps[2].finished] == [r1.seq_id]
    assert (r1.num_completion_tokens, r2.num_completion_tokens) == (2, 5)


def test_c_block_boundary(folder: Path) -> None:
    """A prompt of exactly one block: the second block comes with the first decode, not before."""
    watch = start(folder)
    manager = watch.llm.scheduler.block_manager
    put_first(watch.llm, 9, 6)
    seq = add(watch.llm, random_ids(256), max_tokens=3)

    step = watch.step()
    assert progress(seq) == "257/256"
    assert (seq.num_blocks, seq.block_table) == (2, [9])
    assert step.num_free_blocks == 31

    step = watch.step()
    assert seq.block_table == [9, 6]
    assert step.positions == [256]
    assert step.context.context_lens.tolist() == [257]
    assert step.context.slot_mapping.tolist() == [6 * 256]
    assert step.context.block_tables.tolist() == [[9, 6]]
    assert progress(seq) == "258/257"

    step = watch.step()
    assert step.positions == [257]
    assert step.context.slot_mapping.tolist() == [6 * 256 + 1]
    assert step.context.block_tables.tolist() == [[9, 6]]
    assert seq.is_finished and seq.block_table == []
    assert len(manager.free_block_ids) == 32 and not manager.used_block_ids


def test_lifecycle(folder: Path) -> None:
    """Prompts of 64 and 96 ids, max_tokens 2 and 3, in one prefill step."""
    watch = start(folder)
    a = add(watch.llm, random_ids(64, seed=1), max_tokens=2)
    b = add(watch.llm, random_ids(96, seed=2), max_tokens=3)

    step = watch.step()
    assert len(step.input_ids) == 160
    assert step.hidden.shape == (2, 64)
    assert step.positions == [*range(64), *range(96)]
    assert step.context.cu_seqlens_q.tolist() == [0, 64, 160]
    assert step.context.cu_seqlens_k.tolist() == [0, 64, 160]
    assert (step.context.max_seqlen_q, step.context.max_seqlen_k) == (96, 96)
    assert step.context.block_tables is None
    assert step.last_rows == [63, 159]
    assert (progress(a), progress(b)) == ("65/64", "97/96")

    step = watch.step()
    assert step.positions == [64, 96]
    assert step.context.context_lens.tolist() == [65, 97]
    assert step.input_ids == [a.token_ids[64], b.token_ids[96]]
    assert a.is_finished and progress(b) == "98/97"

    (step,) = watch.run()
    assert step.seqs == [b] and b.num_completion_tokens == 3


def test_chunk(folder: Path) -> None:
    """Prompts of 700 and 32 ids with a budget of 512: the first is cut, the second joins its
    rest. A's table is [17, 5, 23], B's [11]."""
    watch = start(folder, max_num_batched_tokens=512)
    put_first(watch.llm, 17, 5, 23, 11)
    a = add(watch.llm, random_ids(700, seed=3), max_tokens=2)
    b = add(watch.llm, random_ids(32, seed=4), max_tokens=2)

    step = watch.step()
    assert step.seqs == [a] and step.num_tokens == 512
    assert step.positions == [*range(512)]
    assert (progress(a), a.num_completion_tokens) == ("700/512", 0)
    assert (a.status.name, list(watch.llm.scheduler.waiting)) == ("WAITING", [a, b])
    assert b.block_table == []

    step = watch.step()
    assert step.seqs == [a, b] and step.num_tokens == 220
    assert step.input_ids == a.token_ids[512:700] + b.token_ids[:32]
    assert step.positions == [*range(512, 700), *range(32)]
    assert step.context.cu_seqlens_q.tolist() == [0, 188, 220]
    assert step.context.cu_seqlens_k.tolist() == [0, 700, 732]
    assert (step.context.max_seqlen_q, step.context.max_seqlen_k) == (188, 700)
    assert step.context.block_tables.tolist() == [[17, 5, 23], [11, -1, -1]]
    assert step.context.slot_mapping.tolist() == [*range(5888, 6076), *range(2816, 2848)]
    assert step.last_rows == [187, 219]
    assert (progress(a), progress(b)) == ("701/700", "33/32")

    step = watch.step()
    assert step.positions == [700, 32]
    assert step.context.context_lens.tolist() == [701, 33]
    assert step.context.slot_mapping.tolist() == [6076, 2848]
    assert a.is_finished and b.is_finished


def sharing_prompts() -> tuple[list[int], list[int]]:
    """Two prompts of 620 ids with the same first 512."""
    first = random_ids(620, seed=5)
    second = first[:512] + random_ids(108, seed=6)
    assert first[512] != second[512]
    return first, second


def test_prefix_hit(folder: Path) -> None:
    """The second prompt, submitted after the first is done, computes only its last 108 ids."""
    watch = start(folder)
    first, second = sharing_prompts()
    one = add(watch.llm, first, max_tokens=1)
    assert watch.step().num_tokens == 620
    assert one.is_finished

    two = add(watch.llm, second, max_tokens=2)
    step = watch.step()
    assert step.num_tokens == 108
    assert step.positions == [*range(512, 620)]
    assert step.input_ids == second[512:]
    assert step.context.cu_seqlens_q.tolist() == [0, 108]
    assert step.context.cu_seqlens_k.tolist() == [0, 620]
    assert step.context.block_tables.tolist() == [two.block_table]
    assert len(two.block_table) == 3
    assert progress(two) == "621/620"


def test_prefix_reference_counts(folder: Path) -> None:
    """The two shared blocks over release, reuse, a second sharer and two releases."""
    watch = start(folder)
    first, second = sharing_prompts()
    one = add(watch.llm, first, max_tokens=2)
    watch.step()
    shared = one.block_table[:2]
    watch.step()
    assert one.is_finished
    counts = [ref_counts(watch.llm, shared)]

    two = add(watch.llm, second, max_tokens=3)
    watch.step()
    counts.append(ref_counts(watch.llm, shared))
    three = add(watch.llm, first, max_tokens=4)
    watch.step()
    counts.append(ref_counts(watch.llm, shared))
    assert two.block_table[:2] == three.block_table[:2] == shared
    assert len(watch.llm.scheduler.block_manager.used_block_ids) == 4, "both alive: 4, not 6"

    while not two.is_finished:
        watch.step()
    counts.append(ref_counts(watch.llm, shared))
    assert not three.is_finished
    watch.run()
    counts.append(ref_counts(watch.llm, shared))
    assert counts == [[0, 0], [1, 1], [2, 2], [1, 1], [0, 0]]


def test_prefix_last_full_block_is_computed_again(folder: Path) -> None:
    """A prompt of 512 ids repeated hits one block (256), not two."""
    watch = start(folder)
    prompt = random_ids(512, seed=7)
    first = add(watch.llm, prompt, max_tokens=2)
    watch.run()
    again = add(watch.llm, prompt, max_tokens=2)
    step = watch.step()
    assert (step.num_tokens, step.positions) == (256, [*range(256, 512)])
    watch.run()
    assert again.completion_token_ids == first.completion_token_ids


def test_preempt(folder: Path) -> None:
    """Block size 4, 4 blocks, three prompts of 4 ids: in the first decode A takes the last block,
    B needs one, so C gives way."""
    watch = start(folder, kvcache_block_size=4, num_kvcache_blocks=4)
    scheduler = watch.llm.scheduler
    a, b, c = (add(watch.llm, random_ids(4, seed=8 + i), max_tokens=6) for i in range(3))

    step = watch.step()
    assert (step.seqs, step.num_tokens, step.num_free_blocks) == ([a, b, c], 12, 1)
    assert [progress(seq) for seq in (a, b, c)] == ["5/4"] * 3
    ids_of_c, block_of_c = list(c.token_ids), c.block_table[0]

    step = watch.step()
    assert (step.seqs, step.num_tokens) == ([a, b], -2)
    assert (list(scheduler.waiting), list(scheduler.running)) == ([c], [a, b])
    assert (c.status.name, c.num_cached_tokens, c.block_table) == ("WAITING", 0, [])
    assert c.token_ids == ids_of_c and len(ids_of_c) == 5
    assert b.block_table[1] == block_of_c

    watch.run()
    assert [seq.num_completion_tokens for seq in (a, b, c)] == [6, 6, 6]
    assert len(scheduler.block_manager.free_block_ids) == 4


def test_slots(folder: Path) -> None:
    """Block size 4, table [17, 5, 23]: positions 0, 6 and 8 go to slots 68, 22 and 92."""
    watch = start(folder, kvcache_block_size=4)
    put_first(watch.llm, 17, 5, 23)
    seq = add(watch.llm, random_ids(9), max_tokens=2)
    slots = watch.step().context.slot_mapping.tolist()
    assert seq.block_table == [17, 5, 23]
    assert (slots[0], slots[6], slots[8]) == (68, 22, 92)
    assert slots == [68, 69, 70, 71, 20, 21, 22, 23, 92]


@pytest.mark.parametrize(("length", "blocks"), [(255, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_blocks_of_a_length(folder: Path, length: int, blocks: int) -> None:
    watch = start(folder)
    seq = add(watch.llm, random_ids(length), max_tokens=2)
    assert seq.num_blocks == blocks
    assert watch.step().num_free_blocks == 32 - blocks
    assert len(seq.block_table) == blocks
