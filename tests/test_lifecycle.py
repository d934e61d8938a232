"""Start, failure and end of an engine: what is left behind, and what still works."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, random_ids
from invariants import check_invariants
from recording import GREEDY, Watch, add

from nanovllm import LLM, SamplingParams
from nanovllm.utils.context import get_context

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with start(folder) as engine:
        yield engine


def start(folder: Path, **settings: Any) -> LLM:
    settings = {"kvcache_block_size": 4, "max_num_batched_tokens": 16, **settings}
    return LLM(folder, device="cpu", **{"num_kvcache_blocks": 64, **settings})


def completions(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, **GREEDY)
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def run_python(code: str, *args: object) -> str:
    """The standard output of a fresh interpreter, which must end well."""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the end --------------------------------------------------------------------------------------


def test_case_36_exit_twice_does_nothing_the_second_time(folder: Path) -> None:
    llm = start(folder)
    exits: list[int] = []
    runner_exit = llm.model_runner.exit
    llm.model_runner.exit = lambda: exits.append(1) or runner_exit()
    llm.exit()
    llm.exit()
    assert exits == [1]


def test_with_statement_ends_the_engine(folder: Path) -> None:
    with start(folder) as llm:
        assert len(completions(llm, [[1, 2]], 2)[0]) == 2
    with pytest.raises(RuntimeError, match="exited"):
        llm.step()


def test_with_statement_ends_the_engine_on_error(folder: Path) -> None:
    with pytest.raises(KeyError), start(folder) as llm:
        raise KeyError
    with pytest.raises(RuntimeError, match="exited"):
        llm.step()


def test_use_after_exit_says_so(llm: LLM) -> None:
    llm.exit()
    uses = [
        lambda: llm.generate([[1]], use_tqdm=False),
        lambda: llm.add_request([1]),
        llm.step,
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="this engine has exited"):
            use()
    assert llm.is_finished()


@pytest.mark.parametrize("end", ["exit", "collected"])
def test_memory_is_given_back(folder: Path, end: str) -> None:
    """Model and pool are gone after exit(), and when an engine is dropped without it."""
    llm = start(folder)
    completions(llm, [[1, 2, 3]], 2)
    runner = llm.model_runner
    left = [weakref.ref(runner.model), weakref.ref(runner.kv_cache)]
    assert all(ref() is not None for ref in left)
    del runner
    if end == "exit":
        llm.exit()
    else:
        gc.disable()  # no cycle holds it: in a notebook the next engine needs its memory at once
        try:
            del llm
            assert [ref() for ref in left] == [None, None]
        finally:
            gc.enable()
    assert [ref() for ref in left] == [None, None]


def test_the_engine_ends_at_interpreter_exit() -> None:
    """Without exit() and without `with`; the runner's exit runs once, and nothing complains."""
    code = """
import sys
sys.path.insert(0, "tests")
from checkpoints import TINY_QWEN3
from nanovllm import LLM
from nanovllm.engine.model_runner import ModelRunner
runner_exit = ModelRunner.exit
ModelRunner.exit = lambda self: (runner_exit(self), print("exited"))
llm = LLM(TINY_QWEN3, num_kvcache_blocks=2, device="cpu")
print("end of the script")
"""
    assert run_python(code) == "end of the script\nexited\n"


# --- two engines ----------------------------------------------------------------------------------


def test_case_36_one_after_the_other(folder: Path, llm: LLM) -> None:
    expected = completions(llm, [random_ids(9)], 6)
    llm.exit()
    for block_size in (256, 4):
        with start(folder, kvcache_block_size=block_size) as second:
            assert completions(second, [random_ids(9)], 6) == expected


def test_case_36_two_processes_at_once() -> None:
    """Each runs to its end beside the other, with the same greedy text."""
    code = """
import sys
from nanovllm import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", num_kvcache_blocks=4) as llm:
    print("started", flush=True)
    sys.stdin.read()  # until the other one has started as well
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    print(llm.generate(["ROMEO:"], params, use_tqdm=False)[0]["token_ids"])
"""
    command = [sys.executable, "-c", code, str(ROOT / "tests" / "assets" / "tiny-qwen3")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["started\n"] * 2
    results = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert results[0] == results[1] and len(results[0].split(",")) == 8


def test_two_engines_of_different_block_size_in_one_process(folder: Path) -> None:
    """Their steps alternate; neither disturbs the other's blocks or tokens."""
    prompt = random_ids(11)
    with start(folder) as small, start(folder, kvcache_block_size=256) as large:
        expected = completions(small, [prompt], 12)
        a, b = add(small, prompt, max_tokens=12), add(large, prompt, max_tokens=12)
        while not (small.is_finished() and large.is_finished()):
            small.step()
            large.step()
        assert [a.completion_token_ids] == [b.completion_token_ids] == expected
        assert (a.block_size, b.block_size) == (4, 256)
        assert a.seq_id != b.seq_id


# --- a step that fails ----------------------------------------------------------------------------


def fail_at(llm: LLM, step: int, error: type[BaseException]) -> None:
    """Let the model raise at the end of its `step`-th forward pass from now on, once: K/V of every
    layer is written by then."""
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == step:
            raise error("made to fail")

    llm.model_runner.model.register_forward_hook(hook)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", [1, 3, 7])
def test_case_38_generate_again_after_a_failure(
    folder: Path, llm: LLM, step: int, error: type[BaseException]
) -> None:
    """In a whole prefill, in the chunks of a long one (2 to 4), in a decode: the pool is free
    at once, and the next call returns its own results only."""
    prompts = [random_ids(10, seed=1), random_ids(40, seed=2)]
    fail_at(llm, step, error)
    with pytest.raises(error, match="made to fail"):
        completions(llm, prompts, 8)
    manager = llm.scheduler.block_manager
    assert llm.is_finished()
    assert len(manager.free_block_ids) == 64 and not manager.used_block_ids
    with pytest.raises(RuntimeError, match="no step is running"):
        get_context()
    again = [prompts[1], random_ids(6, seed=3)]
    with start(folder) as fresh:
        assert completions(llm, again, 8) == completions(fresh, again, 8)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", [1, 3, 7])
def test_case_38_step_again_after_a_failure(
    folder: Path, llm: LLM, step: int, error: type[BaseException]
) -> None:
    """A caller who drives `step` just goes on: the step's requests wait again and lose no token;
    one that was not in the step (the first, while the second's chunks run) is not touched."""
    prompts = [random_ids(10, seed=1), random_ids(40, seed=2)]
    fail_at(llm, step, error)
    watch = Watch(llm)
    seqs = [add(llm, prompt, max_tokens=8) for prompt in prompts]
    failures = 0
    while not llm.is_finished():
        accepted = [seq.num_completion_tokens for seq in seqs]
        try:
            watch.step()
        except error:
            failures += 1
            assert [seq.num_completion_tokens for seq in seqs] == accepted
            waiting = list(llm.scheduler.waiting)
            assert waiting == (seqs[1:] if step == 3 else seqs)
            assert all((seq.block_table, seq.num_cached_tokens) == ([], 0) for seq in waiting)
            check_invariants(llm.scheduler)
    assert failures == 1
    with start(folder) as fresh:
        assert [seq.completion_token_ids for seq in seqs] == completions(fresh, prompts, 8)


def test_case_38_other_requests_survive_a_failed_generate(folder: Path, llm: LLM) -> None:
    """A request that `add_request` queued before is not the failing call's to drop."""
    other = add(llm, random_ids(10, seed=1), max_tokens=8)
    fail_at(llm, 3, RuntimeError)
    with pytest.raises(RuntimeError, match="made to fail"):
        completions(llm, [random_ids(5, seed=2)], 8)
    assert list(llm.scheduler.waiting) == [other] and not llm.scheduler.running
    while not llm.is_finished():
        llm.step()
    with start(folder) as fresh:
        assert completions(fresh, [other.prompt_token_ids], 8) == [other.completion_token_ids]


# --- what need not be installed -------------------------------------------------------------------


def test_case_40_no_flash_attn_no_triton_no_cuda() -> None:
    """The engine runs on its torch path, says so once, and never imports transformers' model."""
    code = """
import logging, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.modules["flash_attn"] = sys.modules["triton"] = None  # importing them is an ImportError
sys.path.insert(0, "tests")
import nanovllm.engine.scheduler
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s: %(message)s")
from nanovllm import LLM, SamplingParams
for path in sys.argv[1:]:
    llm = LLM(path, num_kvcache_blocks=2)
    (output,) = llm.generate(["ROMEO:"], SamplingParams(0, 5, True), use_tqdm=False)
    print(len(output["token_ids"]), llm.model_runner.device.type)
print([name for name in sys.modules if "modeling_qwen3" in name])
"""
    lines = run_python(code, ROOT / "tests" / "assets" / "tiny-qwen3").splitlines()
    (says,) = [line for line in lines if line.startswith("nanovllm")]
    logger, chosen = says.split(": ", maxsplit=1)
    assert logger == "nanovllm.engine.model_runner"
    assert chosen.startswith("torch_attention, torch.float32 on cpu, CUDA graphs off, 2 KV blocks")
    assert lines[-2:] == ["5 cpu", "[]"]
