"""GPU: FlashAttention, CUDA graphs, the loop that runs ahead and the pool, against eager, the
plain loop, torch and transformers. Half-precision results are compared by logits; the tolerance is
the error that transformers' own bfloat16 run makes against its float32 run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import TINY_QWEN3, make_checkpoint, reference_greedy, reference_logits
from checkpoints import reference_model as load_reference

from nanovllm import LLM, SamplingParams
from nanovllm.engine.decode_graphs import graph_batch_sizes
from nanovllm.engine.inputs import decode_inputs, prefill_inputs, sampling_inputs
from nanovllm.engine.sequence import Sequence
from nanovllm.layers import kernels
from nanovllm.layers.attention import flash_attention, store_kv, torch_attention
from nanovllm.layers.fused_kernels import norm_rope_store
from nanovllm.layers.sampler import sample
from nanovllm.utils.context import Context

pytestmark = pytest.mark.gpu

GREEDY = {"temperature": 0, "ignore_eos": True}
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpu"), **SHAPE)


@pytest.fixture
def build(checkpoint: Path) -> Iterator[object]:
    """Make engines on the GPU in bfloat16 and end them after the test."""
    engines: list[LLM] = []

    def make(folder: Path = checkpoint, **settings: object) -> LLM:
        settings = {"dtype": "bfloat16", "num_kvcache_blocks": 256, **settings}
        engines.append(LLM(folder, device="cuda", **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.exit()


def random_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1024, (count,), generator=generator).tolist()


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def first_logits(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """The logits that the first token of `prompt` is sampled from, [vocab_size] float32."""
    seen: list[torch.Tensor] = []
    run_model = llm.model_runner.run_model
    llm.model_runner.run_model = lambda inputs: seen.append(run_model(inputs)) or seen[-1]
    try:
        llm.generate([prompt], SamplingParams(max_tokens=1, **GREEDY), use_tqdm=False)
    finally:
        llm.model_runner.run_model = run_model
    return seen[-1][0].float()


@torch.inference_mode()
def decode_logits_graph_and_eager(
    llm: LLM, seqs: list[Sequence]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step of `seqs` through the graph and through the plain path."""
    runner = llm.model_runner
    assert runner.graphs is not None and runner.graphs.fits(len(seqs))
    hidden = runner.graphs.launch(seqs, {})
    replayed = runner.model.compute_logits(hidden).clone()
    return replayed, runner.run_model(decode_inputs(seqs, runner.device))


def schedule_decode(llm: LLM, prompts: list[list[int]]) -> list[Sequence]:
    """Prefill `prompts` and schedule, but not run, their first decode step."""
    for prompt in prompts:
        llm.add_request(prompt, SamplingParams(max_tokens=8, **GREEDY))
    while llm.scheduler.waiting:
        llm.step()
    seqs, is_prefill = llm.scheduler.schedule()
    assert not is_prefill and len(seqs) == len(prompts)
    return seqs


def drop_all(llm: LLM) -> None:
    for seq in [*llm.scheduler.running, *llm.scheduler.waiting]:
        llm.scheduler.abort(seq)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 10, 17, 20, 33])
def test_case_22_graph_equals_eager_at_every_bucket_edge(build, max_num_seqs: int) -> None:
    """No gap in the buckets: each batch size up to max_num_seqs replays a graph, all slots
    decoding first, then fewer, and gets what the plain path gives."""
    llm = build(max_num_seqs=max_num_seqs, max_model_len=512)
    sizes = graph_batch_sizes(max_num_seqs)
    edges = {n for size in sizes for n in (size - 1, size, size + 1) if 1 <= n <= max_num_seqs}
    for count in sorted(edges, reverse=True):
        seqs = schedule_decode(llm, [random_ids(5 + i, seed=i) for i in range(count)])
        replayed, eager = decode_logits_graph_and_eager(llm, seqs)
        assert relative_l2(replayed, eager) < 0.02, count
        drop_all(llm)


def test_case_08_no_stale_block_table_columns(build) -> None:
    """Three long contexts (5 blocks each), then three short ones in the same bucket."""
    llm = build(max_num_seqs=4, max_model_len=2048)
    for lengths in ((1200, 1100, 1250), (7, 40, 3)):
        prompts = [random_ids(n, seed=n) for n in lengths]
        replayed, eager = decode_logits_graph_and_eager(llm, schedule_decode(llm, prompts))
        assert relative_l2(replayed, eager) < 0.02, lengths
        drop_all(llm)


def test_graph_padding_rows_store_nothing(build) -> None:
    """A batch of 9 runs in the graph of 16: only 9 slots of the pool change."""
    llm = build(max_num_seqs=16, max_model_len=512)
    seqs = schedule_decode(llm, [random_ids(4 + i, seed=i) for i in range(9)])
    pool = llm.model_runner.kv_cache
    before = pool.clone()
    decode_logits_graph_and_eager(llm, seqs)
    changed = (pool != before).any(dim=-1).any(dim=-1)[0, 0].flatten().nonzero().flatten().tolist()
    expected = sorted(s.block_table[-1] * 256 + len(s) - 1 for s in seqs)
    assert changed == expected
    drop_all(llm)


def test_tokens_with_graphs_equal_tokens_without(build, checkpoint: Path) -> None:
    """The bundled model's peaked logits leave no near-ties: whole greedy completions agree."""
    prompts = ["ROMEO:\n", "KING RICHARD III:\nNow", "First Citizen:\n", "JULIET:\nO", "What"]
    params = SamplingParams(max_tokens=40, **GREEDY)
    graphs = build(TINY_QWEN3, max_num_seqs=8)
    eager = build(TINY_QWEN3, max_num_seqs=8, enforce_eager=True)
    assert graphs.model_runner.graphs is not None and eager.model_runner.graphs is None
    a, b = graphs.generate(prompts, params, use_tqdm=False), eager.generate(prompts, params)
    agreement = [
        sum(x == y for x, y in zip(p["token_ids"], q["token_ids"], strict=True)) / 40
        for p, q in zip(a, b, strict=True)
    ]
    assert sum(agreement) / len(agreement) > 0.9, agreement


def test_bundled_model_generates_what_transformers_generates(build) -> None:
    """float32 on the GPU: greedy tokens equal, all of them. bfloat16 through flash-attn and
    graphs: each token is the reference's best within its own bfloat16 error."""
    prompts = ["ROMEO:\n", "KING RICHARD III:\nNow is", "First Citizen:\nBefore we proceed"]
    params = SamplingParams(max_tokens=64, **GREEDY)
    reference = load_reference(TINY_QWEN3).cuda()
    exact = build(TINY_QWEN3, dtype="float32")
    ids = [exact.tokenizer.encode(prompt) for prompt in prompts]
    for prompt, out in zip(ids, exact.generate(prompts, params, use_tqdm=False), strict=True):
        assert out["token_ids"] == reference_greedy(reference, prompt, 64)
    half = load_reference(TINY_QWEN3, torch.bfloat16).cuda()
    fast = build(TINY_QWEN3, dtype="auto")
    assert fast.model_runner.dtype == torch.bfloat16
    for prompt, out in zip(ids, fast.generate(prompts, params, use_tqdm=False), strict=True):
        path = prompt + out["token_ids"]
        logits = reference_logits(reference, path)[len(prompt) - 1 : -1]
        own_error = (reference_logits(half, path)[len(prompt) - 1 : -1] - logits).abs().max()
        chosen = logits.gather(1, torch.tensor(out["token_ids"], device="cuda")[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() <= 2 * own_error


def test_prefill_paths_agree_with_transformers(build, checkpoint: Path) -> None:
    """Whole prefill, chunks (budget 128, not a divisor), prefix hit and batched: the first
    token's logits are as close to transformers' float32 as its own bfloat16 is, times two."""
    prompt = random_ids(700)
    exact = reference_logits(load_reference(checkpoint).cuda(), prompt)[-1]
    half = reference_logits(load_reference(checkpoint, torch.bfloat16).cuda(), prompt)[-1]
    tolerance = 2 * relative_l2(half, exact)
    settings = {"max_model_len": 1024, "enforce_eager": True}  # graphs: see below
    whole = build(**settings)
    chunked = build(**settings, max_num_batched_tokens=128)
    assert relative_l2(first_logits(whole, prompt), exact) < tolerance
    assert relative_l2(first_logits(chunked, prompt), exact) < tolerance
    # The second time 512 of the 700 positions come from the pool.
    assert whole.scheduler.block_manager.can_allocate(Sequence(prompt)) == 2
    assert relative_l2(first_logits(whole, prompt), exact) < tolerance


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("batch", [1, 3, 17, 256])
@pytest.mark.parametrize("phase", ["prefill", "history", "decode"])
def test_flash_attention_equals_torch_attention(phase: str, batch: int, head_dim: int) -> None:
    """Both implementations on the same pool, tables out of order; torch in float32."""
    torch.manual_seed(batch + head_dim)
    heads, kv_heads, block_size, device = 8, 4, 256, "cuda"
    history = torch.randint(1, 600, (batch,)) if phase != "prefill" else torch.zeros(batch).long()
    new = torch.randint(1, 40, (batch,)) if phase != "decode" else torch.ones(batch).long()
    lengths = history + new
    width = int(-(-lengths.max() // block_size))
    tables = torch.randperm(batch * width).view(batch, width).int().to(device)
    pool = torch.randn(2, batch * width, block_size, kv_heads, head_dim, device=device).bfloat16()
    total = int(new.sum())
    q = torch.randn(total, heads, head_dim, device=device).bfloat16()
    k, v = torch.randn(2, total, kv_heads, head_dim, device=device).bfloat16()
    slots = torch.cat(
        [
            tables[i, p // block_size] * block_size + p % block_size
            for i in range(batch)
            for p in torch.arange(history[i], lengths[i], device=device)[None]
        ]
    )
    store_kv(k, v, pool[0], pool[1], slots.int())
    ends_q = torch.cat([torch.zeros(1), new.cumsum(0)]).int().to(device)
    ends_k = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().to(device)
    context = Context(
        is_prefill=phase != "decode",
        slot_mapping=slots.int(),
        cu_seqlens_q=ends_q,
        cu_seqlens_k=ends_k,
        max_seqlen_q=int(new.max()),
        max_seqlen_k=int(lengths.max()),
        context_lens=lengths.int().to(device),
        block_tables=None if phase == "prefill" else tables,
    )
    scale = head_dim**-0.5
    fast = flash_attention(q, k, v, pool[0], pool[1], context, scale)
    exact = torch_attention(*(x.float() for x in (q, k, v, pool[0], pool[1])), context, scale)
    assert relative_l2(fast, exact) < 5e-3


def test_case_42_nothing_in_a_decode_step_waits_for_the_gpu(build) -> None:
    """From inputs to sampled ids, by graph and kernel by kernel, padding rows and all: torch
    raises where the host would wait. (That -1 slots are skipped inside the kernels:
    test_graph_padding_rows_store_nothing and test_kv_store.py.)"""
    llm = build(max_num_seqs=4, max_model_len=512)
    seqs = schedule_decode(llm, [random_ids(5 + i, seed=i) for i in range(3)])
    runner = llm.model_runner

    @torch.inference_mode()
    def step() -> None:
        runner.launch(seqs, is_prefill=False)
        logits = runner.run_model(decode_inputs(seqs, runner.device))
        sample(logits, sampling_inputs(seqs, frozenset(), 1024, runner.device))

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drop_all(llm)


def test_case_34_highest_slots_of_a_large_pool() -> None:
    """slot * width > 2^31: 32-bit offsets would wrap. The highest slots are exact, a -1 row is
    skipped, nothing else is touched."""
    heads, head_dim, block_size = 8, 128, 256
    num_blocks = 2**31 // (heads * head_dim * block_size) + 2
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    shape = (num_blocks, block_size, heads, head_dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    last = num_blocks * block_size - 1
    slots = torch.tensor([last, -1, 0, last - 300], dtype=torch.int32, device="cuda")
    qkv = torch.randn(4, 3 * heads, head_dim, device="cuda").bfloat16()
    angles = torch.randn(2, 10, head_dim // 2, device="cuda")
    weight = torch.ones(head_dim, dtype=torch.bfloat16, device="cuda")
    positions = torch.arange(4, dtype=torch.int32, device="cuda")
    norm_rope_store(qkv, heads, *angles, weight, weight, 1e-6, k_cache, v_cache, positions, slots)
    for rows, cache in ((qkv[:, heads : 2 * heads], k_cache), (qkv[:, 2 * heads :], v_cache)):
        flat = cache.flatten(0, 1)
        for row, slot in ((0, last), (2, 0), (3, last - 300)):
            assert torch.equal(flat[slot], rows[row])
            flat[slot] = 0
        assert not flat.any()


def test_pool_uses_what_the_utilization_allows_and_exit_returns_it(checkpoint: Path) -> None:
    """Within 2% of gpu_memory_utilization after a full-size run, and all of it back after exit;
    a second engine in the same process gets the same number of blocks."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    free_after: list[int] = []
    blocks = []
    for _ in range(2):
        with LLM(checkpoint, device="cuda", dtype="bfloat16", gpu_memory_utilization=0.5) as llm:
            prompts = [random_ids(1000, seed=i) for i in range(64)]
            llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            free, total = torch.cuda.mem_get_info()
            assert abs((total - free) / total - 0.5) < 0.02
            blocks.append(llm.model_runner.num_kvcache_blocks)
        free_after.append(torch.cuda.mem_get_info()[0])
    # The first engine may leave the libraries' own code and workspaces behind, the second nothing.
    assert abs(blocks[0] - blocks[1]) <= 0.01 * blocks[0]
    assert abs(free_after[0] - free_after[1]) < 64 << 20


def test_batches_beyond_the_largest_graph_take_the_plain_path(build) -> None:
    """Above 512 sequences no graph exists; the step still runs and every request finishes."""
    llm = build(max_num_seqs=600, num_kvcache_blocks=700, max_model_len=256)
    prompts = [random_ids(3 + i % 5, seed=i) for i in range(520)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4, **GREEDY), use_tqdm=False)
    assert [len(out["token_ids"]) for out in outputs] == [4] * 520


PROMPTS = ["ROMEO:\n", "KING RICHARD III:\nNow", "First Citizen:\n", "JULIET:\nO", "What"] * 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(seed=3, max_tokens=30, top_k=40, top_p=0.9, min_p=0.01, logprobs=1),
        SamplingParams(seed=5, max_tokens=30, min_tokens=20, stop=["the"]),
    ],
    ids=["greedy", "filters", "stop strings"],
)
@pytest.mark.parametrize("num_blocks", [64, 6], ids=["ample", "preempting"])
def test_the_loop_ahead_gives_what_the_plain_loop_gives(
    build, params: SamplingParams, num_blocks: int
) -> None:
    """Twice the same engine. A resumed request prefills in another batch, where half-precision
    logits differ honestly: nearly all requests must agree token for token, not all."""
    prompts = [prompt * (20 if num_blocks == 6 else 1) for prompt in PROMPTS]
    llm = build(TINY_QWEN3, max_num_seqs=16, num_kvcache_blocks=num_blocks, max_model_len=512)
    ahead = llm.generate(prompts, params, use_tqdm=False)
    assert llm.runs_ahead and not llm.scheduler.block_manager.used_block_ids
    llm.runs_ahead = False
    plain = llm.generate(prompts, params, use_tqdm=False)
    same = 0
    for a, b in zip(ahead, plain, strict=True):
        if a["token_ids"] == b["token_ids"]:
            same += 1
            assert (a["text"], a["finish_reason"]) == (b["text"], b["finish_reason"])
    assert same >= len(prompts) - 3


def test_requests_that_join_a_running_loop(build) -> None:
    """Added from inside a stream's loop, with a step in flight: they finish, and change nothing."""
    llm = build(TINY_QWEN3, max_num_seqs=16)
    params = SamplingParams(max_tokens=24, **GREEDY)
    alone = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    ids: list[list[int]] = [[], []]
    for count, piece in enumerate(llm.stream(PROMPTS[:2], params)):
        ids[piece["index"]] += piece["token_ids"]
        if count == 9:
            llm.add_request(PROMPTS[2], SamplingParams(max_tokens=5, **GREEDY))
    while not llm.is_finished():
        llm.step()
    for own, out in zip(ids, alone, strict=True):
        same = sum(x == y for x, y in zip(own, out["token_ids"], strict=True))
        assert same >= 20
    assert not llm.scheduler.block_manager.used_block_ids


@torch.inference_mode()
def test_short_prefills_by_graph_equal_eager(build) -> None:
    """One to 32 sequences, in buckets that they fill and do not fill: logits and stored K/V."""
    llm = build(max_num_seqs=32)
    eager = build(max_num_seqs=32, enforce_eager=True)
    graphs = llm.model_runner.prefill_graphs
    assert graphs is not None and eager.model_runner.graphs is None
    for lengths in ((3,), (100,), (512,), (3, 100, 247), (700, 1), (2048,), (90,) * 32):
        seqs = []
        for i, length in enumerate(lengths):
            seq = Sequence(random_ids(length, seed=length))
            seq.num_scheduled_tokens = length
            seq.block_table = [3 * i + j for j in range(seq.num_blocks)]
            seqs.append(seq)
        assert graphs.fits(seqs)
        replayed = llm.model_runner.model.compute_logits(graphs.launch(seqs)).clone()
        inputs = prefill_inputs(seqs, eager.model_runner.device)
        assert relative_l2(replayed, eager.model_runner.run_model(inputs)) < 0.02, lengths
        for seq in seqs:
            stored, expected = (
                engine.model_runner.kv_cache[:, :, seq.block_table[0], : min(len(seq), 256)]
                for engine in (llm, eager)
            )
            assert relative_l2(stored, expected) < 0.02, lengths


@pytest.mark.parametrize("fall_back", ["no triton", "no flash-attn", "no dependent launch"])
def test_fall_backs_give_the_same_tokens(
    build, fall_back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older GPU or a barer installation takes, against transformers in float32: each token
    is the reference's best within half a nat."""
    if fall_back == "no triton":
        monkeypatch.setattr(kernels, "HAS_TRITON", False)
    elif fall_back == "no flash-attn":
        monkeypatch.setattr("nanovllm.layers.attention.flash_attn_varlen_func", None)
        monkeypatch.setattr("nanovllm.layers.attention.flash3_varlen_func", None)
    else:
        monkeypatch.setattr("nanovllm.layers.pdl.HAS_PDL", False)
    llm = build(TINY_QWEN3, max_num_seqs=4)
    assert (llm.model_runner.graphs is None) == (fall_back == "no triton")
    reference = load_reference(TINY_QWEN3).cuda()
    outputs = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=32, **GREEDY), use_tqdm=False)
    for prompt, out in zip(PROMPTS[:3], outputs, strict=True):
        ids = llm.tokenizer.encode(prompt)
        logits = reference_logits(reference, ids + out["token_ids"])[len(ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(out["token_ids"], device="cuda")[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < 0.5
