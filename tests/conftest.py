"""What all test files share: the rule for GPU tests, and a few fixtures."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is first imported: without a GPU its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

# A job that a shell started in the background ignores Ctrl-C, and so would the processes that the
# tests of it start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The models here are tiny: on a busy machine, threads waiting for each other can take a hundred
# times as long as the work. With one, results do not depend on the number of cores either.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no GPU. Where there is one, tests of kernels that
    take the `device` fixture run on it, and are GPU tests too."""
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none")
    for item in items:
        if not torch.cuda.is_available():
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
        elif "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN: what a kernel leaves unwritten, or reads too early, shows."""
    for name in ("empty", "empty_like"):
        function = getattr(torch, name)

        def poison(*args: Any, function: Any = function, **kwargs: Any) -> torch.Tensor:
            tensor = function(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poison)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Path:
    """The bundled trained model's folder."""
    from checkpoints import TINY_QWEN3

    assert (TINY_QWEN3 / "model.safetensors").is_file(), "the bundled model is incomplete"
    return TINY_QWEN3


@pytest.fixture(scope="session")
def wide_tq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random TQ with a row for every id of the bundled tokenizer: it takes texts, and what it
    emits has a text. Without generation_config.json. Nobody changes it."""
    from checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("wide_tq"), vocab_size=2048)


@pytest.fixture(scope="session")
def sixteen_greedy(wide_tq: Path) -> list[list[int]]:
    """The sixteen greedy tokens of `wide_tq` after each of streaming.PROMPTS."""
    from streaming import PROMPTS, SIXTEEN, start_small

    with start_small(wide_tq) as llm:
        outputs = llm.generate(PROMPTS, SIXTEEN, use_tqdm=False)
    return [output["token_ids"] for output in outputs]
