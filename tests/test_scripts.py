"""example.py and bench.py: what they print, what they measure with, and how they refuse."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checkpoints import TINY_QWEN3, TQ, make_checkpoint, reference_greedy, reference_model
from safetensors.torch import load_file

from nanovllm import LLM
from nanovllm.tools import dummy_model
from nanovllm.tools.dummy_model import dummy_config, dummy_tensors, write_dummy
from nanovllm.utils.hf import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent


def run_script(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository from another folder, on the CPU and (as conftest explains) on
    one thread."""
    return subprocess.run(
        [sys.executable, str(ROOT / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("example")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("bench")


# --- example.py -----------------------------------------------------------------------------------


def test_example_without_arguments(example: ModuleType) -> None:
    """The main job: of each prompt a completion and why it ended, and how fast it all was."""
    done = run_script("example.py")
    assert done.returncode == 0, done.stderr
    for prompt in example.PLAY:
        assert "Prompt:\n    " + prompt.splitlines()[0] in done.stdout
    completions = re.findall("^Completion:\n(.*?)^Finish reason: ", done.stdout, re.M | re.S)
    assert len(completions) == len(example.PLAY) and all(map(str.strip, completions))
    assert len(re.findall("^Finish reason: (?:stop|length)$", done.stdout, re.M)) == 3
    speed = re.search(r"\n(\d+) tokens in [\d.]+ s: \d+ tok/s\n$", done.stdout)
    assert speed and 3 <= int(speed[1]) <= 3 * 128


def complete(example: ModuleType, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the example prints as its only completion: greedy, 12 tokens, in this process."""
    example.run(example.parse_args(["--temperature", "0", "--max-tokens", "12", *argv]))
    found = re.search("Completion:\n(.*)\nFinish reason: ", capsys.readouterr().out, re.S)
    return re.sub("^    ", "", found[1], flags=re.M)


def reference_text(prompt: str) -> str:
    """What transformers makes of it with the bundled model: greedy, 12 tokens or up to an EOS."""
    tokenizer, model = load_tokenizer(str(TINY_QWEN3)), reference_model(TINY_QWEN3)
    text = tokenizer.decode(reference_greedy(model, tokenizer.encode(prompt), 12))
    return text.partition("<|")[0]


def test_example_continues_plain_text(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundled model has a chat template, but is not asked through it."""
    assert complete(example, capsys, "JULIET:") == reference_text("JULIET:")


def test_example_applies_the_chat_template(
    tmp_path: Path,
    example: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any other model that has one is; here it is a copy of the bundled one. It is not to think."""
    shutil.copytree(TINY_QWEN3, tmp_path, dirs_exist_ok=True)
    chat, options = example.LLM.chat, []
    monkeypatch.setattr(
        example.LLM, "chat", lambda *args, **keys: options.append(keys) or chat(*args, **keys)
    )
    completion = complete(example, capsys, "--model", str(tmp_path), "Good morrow!")
    prompt = "<|im_start|>user\nGood morrow!<|im_end|>\n<|im_start|>assistant\n"
    assert completion == reference_text(prompt) != reference_text("Good morrow!")
    assert options == [{"chat_template_kwargs": {"enable_thinking": False}}]


def test_example_passes_its_settings_through(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--tp and --enforce-eager reach LLM by the names that it knows."""
    seen: dict[str, object] = {}

    def no_llm(model: Path, **settings: object) -> None:
        seen.update(settings)
        raise ValueError("enough")

    monkeypatch.setattr(example, "LLM", no_llm)
    with pytest.raises(ValueError, match="enough"):
        example.run(example.parse_args(["--tp", "3", "--enforce-eager"]))
    assert seen == {"tensor_parallel_size": 3, "enforce_eager": True, "max_model_len": 4096}


@pytest.mark.parametrize("script", ["example.py", "bench.py"])
def test_bad_model_folder_is_one_line(script: str, tmp_path: Path) -> None:
    """A user's mistake ends in the sentence that says what to do, not in a traceback."""
    done = run_script(script, "--model", str(tmp_path / "none"))
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(f"{script}: model folder '.*/none' does not exist.*\n", done.stderr)


# --- bench.py: the load ---------------------------------------------------------------------------


def test_classic_workload(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of the published figures: 142,827 prompt and 133,966 output tokens. Without a GPU,
    which it would keep busy for hours, a small one."""
    small = bench.parse_args(["--dummy", "qwen3-0.6b", "--device", "cpu", "--max-input", "99"])
    assert (small.num_seqs, small.max_input, small.max_output) == (8, 99, 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = bench.parse_args([])
    assert args.dummy == "qwen3-0.6b"
    load = bench.draw_workload(args, args.max_token_id)
    assert len(load.prompts) == len(load.output_lens) == 256
    assert sum(map(len, load.prompts)) == 142_827
    assert sum(load.output_lens) == 133_966
    ids = [token_id for prompt in load.prompts for token_id in prompt]
    assert (min(ids), max(ids)) == (0, 10_000)
    assert (args.temperature, args.max_model_len) == (0.6, 4096)


def test_repeats_have_the_same_lengths_and_other_ids(bench: ModuleType) -> None:
    """Else the prefix cache would have the answers from the repeat before."""
    args = bench.parse_args(["--dummy", "qwen3-0.6b", "--num-seqs", "8"])
    first, second = (bench.draw_workload(args, 10_000, repeat) for repeat in (0, 1))
    assert first.output_lens == second.output_lens
    assert [*map(len, first.prompts)] == [*map(len, second.prompts)]
    starts = [{tuple(prompt[:16]) for prompt in load.prompts} for load in (first, second)]
    assert len(starts[0]) == len(starts[1]) == 8 and not starts[0] & starts[1]


def test_equal_bounds_fix_the_lengths(bench: ModuleType) -> None:
    flags = "--num-seqs 3 --min-input 8 --max-input 8 --min-output 5 --max-output 5"
    load = bench.draw_workload(bench.parse_args(flags.split()), 100)
    assert [*map(len, load.prompts)] == [8, 8, 8] and load.output_lens == [5, 5, 5]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_default_load(has_gpu: bool, bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classic on a GPU, small without one, where classic would take hours; flags stand in both."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    args = bench.parse_args(["--num-seqs", "5"])
    load = args.num_seqs, args.min_input, args.max_input, args.min_output, args.max_output
    assert load == ((5, 100, 1024, 100, 1024) if has_gpu else (5, 16, 64, 16, 64))
    source = ("qwen3-0.6b", None) if has_gpu else (None, str(TINY_QWEN3))
    assert (args.dummy, args.model) == source


@pytest.mark.parametrize(
    "flags",
    [
        "--min-input 9 --max-input 8",
        "--num-seqs 0",
        "--min-input 0",
        "--min-output 0",
        "--keep here",
        "--model there --keep here",
    ],
)
def test_impossible_flags_are_refused(flags: str, bench: ModuleType) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.parse_args(flags.split())
    assert stop.value.code == 2


# --- bench.py: models of random weights -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_dummy_shapes(name: str, num_parameters: int) -> None:
    """The numbers of parameters that these models really have."""
    shapes = dummy_tensors(dummy_config(name)).values()
    assert sum(map(prod, shapes)) == num_parameters


@pytest.fixture
def small_dummy(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """An untied config.json like the real ones, but of TQ's shape, to be cut into many shards."""
    monkeypatch.setattr(dummy_model, "SHARD_BYTES", 40_000)
    return dummy_config("qwen3-8b") | TQ


def test_dummy_checkpoint(tmp_path: Path, small_dummy: dict[str, object]) -> None:
    """What is written is a complete sharded checkpoint, the same each time, and is used again."""
    for folder in (tmp_path / "a", tmp_path / "b"):
        write_dummy(folder, small_dummy, tokenizer=TINY_QWEN3)
    shards = sorted(tmp_path.glob("a/*.safetensors"))
    stored: dict[str, torch.Tensor] = {}
    for shard in shards:
        again = load_file(tmp_path / "b" / shard.name)
        assert all(torch.equal(tensor, again[name]) for name, tensor in load_file(shard).items())
        stored |= load_file(shard)
        # A shard's last tensor may reach past the mark; the largest has 512 * 64 numbers.
        assert shard.stat().st_size < 40_000 + 2 * 512 * 64 + 2_000
    assert len(shards) > 4 and {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    norms = [tensor for tensor in stored.values() if tensor.dim() == 1]
    assert len(norms) == 2 * 4 + 1 and all((norm == 1).all() for norm in norms)
    assert stored["lm_head.weight"].float().std().item() == pytest.approx(0.02, rel=0.05)
    with LLM(tmp_path / "a", device="cpu", num_kvcache_blocks=1, max_model_len=64) as llm:
        assert len(llm.generate([[1, 2]], use_tqdm=False)[0]["token_ids"]) > 0

    before = shards[0].stat().st_mtime_ns
    write_dummy(tmp_path / "a", small_dummy, tokenizer=TINY_QWEN3)
    assert shards[0].stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="neither empty nor this dummy model"):
        other = small_dummy | {"rope_theta": 12345.0}
        write_dummy(tmp_path / "a", other, tokenizer=TINY_QWEN3)


def test_dummy_folder_is_temporary(
    tmp_path: Path, bench: ModuleType, small_dummy: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes are not left behind when the engine refuses to start; with --keep they stay."""
    monkeypatch.setattr(bench, "dummy_config", lambda name: small_dummy)
    with (
        pytest.raises(RuntimeError),
        bench.model_folder(bench.parse_args(["--dummy", "qwen3-8b"])) as folder,
    ):
        assert Path(folder, "model.safetensors.index.json").is_file()
        raise RuntimeError
    assert not Path(folder).exists()
    kept = bench.parse_args(["--dummy", "qwen3-8b", "--keep", str(tmp_path / "kept")])
    with bench.model_folder(kept) as folder:
        assert folder == str(tmp_path / "kept")
    assert Path(folder, "model.safetensors.index.json").is_file()


# --- bench.py: the measurement --------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_decode_bytes(tied: bool, tmp_path: Path, bench: ModuleType) -> None:
    """All weights once a step, an untied embedding not, and the K/V of every context. Decode
    contexts here: 4 and 5 positions | none, since its one token comes from prefill | 5."""
    folder = make_checkpoint(tmp_path, tie_word_embeddings=tied)
    load = bench.Workload([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [3, 1, 2])
    num_weights = sum(param.numel() for param in reference_model(folder).parameters())
    if not tied:
        num_weights -= 512 * 64
    position_bytes = 4 * (2 * 2 * 2 * 16)  # float32: K and V, 2 layers, 2 KV heads, head_dim 16
    with LLM(folder, device="cpu", num_kvcache_blocks=3, max_model_len=64) as llm:
        num_bytes = bench.decode_bytes(llm, load, num_steps=2)
    assert num_bytes == 2 * 4 * num_weights + (4 + 5 + 5) * position_bytes


def test_phases_are_counted_apart(tmp_path: Path, bench: ModuleType) -> None:
    """Prompts 3, 2, 4 and outputs 3, 1, 2 under a budget of 5 positions: two steps of prefill (3 +
    2, 4), two of decode (2 requests, 1)."""
    load = bench.Workload([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [3, 1, 2])
    settings = {"device": "cpu", "num_kvcache_blocks": 3, "max_num_batched_tokens": 5}
    with bench.TimedLLM(make_checkpoint(tmp_path), max_model_len=64, **settings) as llm:
        run = bench.measure(llm, load, temperature=0.6)
        single = bench.measure(llm, bench.Workload([[7, 7]], [1]), temperature=0)
    counts = {name: run[name] for name in run if name.endswith(("_steps", "_tokens"))}
    assert counts == {
        "prompt_tokens": 9,
        "output_tokens": 6,
        "prefill_steps": 2,
        "prefill_tokens": 9,
        "decode_steps": 2,
        "decode_tokens": 3,
    }
    assert run["preemptions"] == 0
    assert run["ttft_ms"] is None and 0 < single["ttft_ms"] <= 1e3 * single["seconds"]
    assert single["decode_steps"] == 0 and single["decode_tok_s"] is None
    assert run["output_tok_s"] == pytest.approx(6 / run["seconds"])
    assert run["decode_step_ms"] == pytest.approx(1e3 * run["decode_seconds"] / 2)


def test_steps_have_no_gaps_between_them(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the loop that runs ahead, turns that take in no step are part of the next one that is
    taken in, the first turn as well as one after a drain."""
    turns = iter([0, 5, -1, 0, -1])
    monkeypatch.setattr(LLM, "__init__", lambda self, model: None)
    monkeypatch.setattr(LLM, "_loop_step", lambda self: ([], next(turns)))
    monkeypatch.setattr(bench, "perf_counter", lambda: next(clock))
    clock = iter(range(10))
    llm = bench.TimedLLM("")
    for _ in range(5):
        llm._loop_step()
    assert llm.steps == [(0, 1, 5), (1, 2, -1), (2, 3, -1)]


def test_preemptions_are_counted(tmp_path: Path, bench: ModuleType) -> None:
    """A tight pool: the engine's own calls are the truth."""
    settings = {"device": "cpu", "num_kvcache_blocks": 6, "kvcache_block_size": 4}
    load = bench.Workload([[i] * 4 for i in range(4)], [9] * 4)
    with bench.TimedLLM(make_checkpoint(tmp_path), max_model_len=64, **settings) as llm:
        calls, preempt = [], llm.scheduler.preempt
        llm.scheduler.preempt = lambda seq: (calls.append(seq), preempt(seq))
        run = bench.measure(llm, load, temperature=0)
    assert run["preemptions"] == len(calls) > 0


def test_a_load_that_would_be_cut_is_refused(bench: ModuleType) -> None:
    """Its figures would be those of a smaller load than the one reported."""
    flags = "--num-seqs 2 --min-input 60 --max-input 60 --max-model-len 64 --num-kvcache-blocks 9"
    args = bench.parse_args(["--model", str(TINY_QWEN3), "--device", "cpu", *flags.split()])
    with pytest.raises(ValueError, match=r"more than max_model_len=64: raise --max-model-len"):
        bench.bench(args)


def test_bench_small_on_cpu() -> None:
    """The last line is one JSON object with everything; ids stay inside the small vocabulary."""
    flags = "--num-seqs 4 --min-input 8 --max-input 16 --min-output 4 --max-output 8 --repeats 2"
    done = run_script("bench.py", "--model", str(TINY_QWEN3), *flags.split())
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    rates = {"output_tok_s", "prefill_tok_s", "decode_tok_s", "decode_step_ms", "decode_gb_s"}
    assert all(report[name] > 0 for name in rates | {"init_seconds", "kv_blocks"})
    assert rates <= report["repeats"][0].keys() and len(report["repeats"]) == 2
    middle = sum(run["output_tok_s"] for run in report["repeats"]) / 2
    assert report["output_tok_s"] == pytest.approx(middle)
    assert report["ttft_ms"] is report["gpu"] is report["peak_reserved_gib"] is None
    assert report["driver_used_gib"] is None and report["cuda_graphs"] is False
    assert report["versions"].keys() == {"python", "torch", "triton", "transformers", "flash_attn"}
    assert report["versions"]["torch"] == torch.__version__
    assert report["workload"]["max_token_id"] == 2047 and report["settings"]["device"] == "auto"
    assert 4 * 4 <= report["output_tokens"] <= 4 * 8
