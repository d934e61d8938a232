"""A traced engine does what an untraced one does, and is itself again afterwards; the command says
what it refuses. What the trace prints is tested in test_walks.py."""

import runpy
import sys

import pytest
from checkpoints import TINY_QWEN3
from tracing import trace

from nanovllm import LLM, SamplingParams
from nanovllm.tools.events import letters
from nanovllm.tools.table import ranges
from nanovllm.tools.tracer import Tracer
from nanovllm.tools.walks import WALKS
from nanovllm.trace import parse_args

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_a_traced_engine_gives_the_same_tokens_and_is_itself_again() -> None:
    """Nothing of a trace stays: no method of the instance, no hook on a module."""
    prompts = [[100, 200, 300], [5] * 9]
    with LLM(TINY_QWEN3, device="cpu", num_kvcache_blocks=8) as llm:
        expected = [out["token_ids"] for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        owners = (llm.scheduler, llm.scheduler.block_manager, llm.model_runner)
        before = [set(vars(owner)) for owner in owners]
        with Tracer(llm, shapes=True) as tracer:
            assert any(module._forward_hooks for module in llm.model_runner.model.modules())
            for prompt in prompts:
                llm.add_request(prompt, GREEDY)
            tokens: dict[str, list[int]] = {}
            while not llm.is_finished():
                for outcome in tracer.step().after_postprocess.outcomes:
                    tokens.setdefault(outcome.name, []).append(outcome.candidate)
        assert [tokens["A"], tokens["B"]] == expected
        assert [set(vars(owner)) for owner in owners] == before
        assert not any(module._forward_hooks for module in llm.model_runner.model.modules())


def test_the_engine_is_itself_again_after_an_error() -> None:
    with LLM(TINY_QWEN3, device="cpu", num_kvcache_blocks=8) as llm:
        with pytest.raises(KeyboardInterrupt), Tracer(llm):
            raise KeyboardInterrupt
        assert "schedule" not in vars(llm.scheduler) and "run" not in vars(llm.model_runner)


@pytest.mark.gpu
@pytest.mark.parametrize("walk", WALKS)
def test_walks_on_a_gpu_schedule_as_on_the_cpu(walk: str) -> None:
    """Step by step, and layer 0 is seen there too."""
    _, on_cpu = trace("--walk", walk)
    lines, steps = trace("--device", "cuda", "--walk", walk, "--shapes")
    assert [step.scheduled for step in steps] == [step.scheduled for step in on_cpu]
    assert any("qkv_proj" in line or "o_proj" in line for line in lines)


# --- the command ----------------------------------------------------------------------------------


def test_own_prompts_and_settings() -> None:
    """Texts and ids; each gets a letter, its own ids and --max-tokens tokens."""
    flags = ("--max-tokens", "2", "--block-size", "4", "--blocks", "6", "--budget", "8")
    lines, _ = trace("ROMEO:", "--ids", "5,6,7,8,9", *flags)
    assert lines[:2] == [
        "your prompts",
        "pool: 6 blocks of 4 positions; a step: at most 8 prefill positions, 512 requests",
    ]
    assert lines[2].startswith("A: 2 ids [") and lines[2].endswith("], max_tokens 2")
    assert lines[3] == "B: 5 ids [5, 6, 7, 8, 9], max_tokens 2"
    assert sum(line.startswith("step ") for line in lines) == 2


def run_as_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["trace", *arguments])
    monkeypatch.delitem(sys.modules, "nanovllm.trace")
    runpy.run_module("nanovllm.trace", run_name="__main__")


def test_the_command_alone_prints_walk_a(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_main(monkeypatch, "--device", "cpu")
    assert capsys.readouterr().out == "\n".join([*trace("--walk", "A")[0], ""])


def test_a_missing_model_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="trace: model folder 'no/such/folder' does not exist"):
        run_as_main(monkeypatch, "--model", "no/such/folder")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--walk", "A", "ROMEO:"],
        ["--walk", "A", "--ids", "1,2"],
        ["--walk", "D"],
        ["--ids", "1,x"],
        ["--max-tokens", "3"],
        ["--walk", "A", "--temperature", "1"],
    ],
)
def test_a_contradictory_command_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(arguments)
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err


def test_a_drawing_without_its_folder_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--svg", "no/such/folder/walk.svg"])
    assert "--svg no/such/folder/walk.svg: there is no folder" in capsys.readouterr().err


def test_ranges_and_letters() -> None:
    assert ranges([17, 5, 23]) == "17 5 23"
    assert ranges([0, 1, 3, 4, 5, 9]) == "0 1 3..5 9"
    assert ranges([]) == ""
    assert [letters(i) for i in (0, 25, 26, 51, 52, 701, 702)] == [
        "A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"
    ]  # fmt: skip
