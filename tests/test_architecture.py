"""What keeps the code readable: import direction, the torch-free half, docstrings, sizes."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
SCHEDULING_HALF = {
    "nanovllm.config",
    "nanovllm.sampling_params",
    "nanovllm.engine.sequence",
    "nanovllm.engine.block_manager",
    "nanovllm.engine.scheduler",
    "nanovllm.utils.checks",
}
# The modules with Triton kernels, and what compiles them, which need triton to import.
KERNELS = {
    "compile_ahead",
    "decode_attention",
    "decode_kernels",
    "few_rows",
    "filter_kernels",
    "fused_kernels",
    "pdl",
    "rank_sum",
    "sampler_kernels",
}
SEVERAL_GPUS = {
    "control",
    "lead_runner",
    "process_group",
    "symmetric_memory",
    "worker",
    "workers",
}
TOOLS = {"tools", "trace.py", "verify.py"}  # that come with the engine, but are no part of it
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


LINES = {path: path.read_text(encoding="utf-8").splitlines() for path in FILES}
TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`, which never run."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from walk(child)


def imports(module: str) -> set[str]:
    """All modules that `module` imports by name when it runs, inside functions too."""
    found: set[str] = set()
    for node in walk(TREES[module]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute here"
            # `from nanovllm.engine import scheduler` imports a module as well.
            names = {f"{node.module}.{alias.name}" for alias in node.names} & TREES.keys()
            found.update(names or {node.module})
    return found


def importers(package: str) -> set[str]:
    """The modules that import a package or a part of it."""
    return {m for m in TREES if any(f"{name}.".startswith(f"{package}.") for name in imports(m))}


def run_python(script: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("module", ["nanovllm", *sorted(SCHEDULING_HALF)])
def test_case_40_the_scheduling_half_imports_nothing_heavier_than_numpy_and_xxhash(
    module: str,
) -> None:
    """It runs on a laptop without torch: here every import of torch, triton, ... fails."""
    script = f"""
import sys
before = set(sys.modules)
for heavy in ("torch", "transformers", "triton", "flash_attn", "safetensors"):
    sys.modules[heavy] = None  # importing it raises ImportError
import {module}
from nanovllm import SamplingParams
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*(loaded - sys.stdlib_module_names))
"""
    light = {"nanovllm", "numpy", "xxhash"}
    absent = {"torch", "transformers", "triton", "flash_attn", "safetensors"}
    assert set(run_python(script)) - absent <= light


def test_the_scheduling_half_schedules_without_torch() -> None:
    """Not only the import: a request runs from `add` to its last token."""
    script = f"""
import sys
sys.modules["torch"] = None
from nanovllm.config import Config
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
scheduler = Scheduler(Config(model={str(PACKAGE)!r}), 4, eos_token_ids=[7])
seq = Sequence([1, 2, 3])
scheduler.add(seq)
while not scheduler.is_finished():
    seqs, is_prefill = scheduler.schedule()
    scheduler.postprocess(seqs, [7] * len(seqs), is_prefill)
print(seq.finish_reason, seq.completion_token_ids[0])
"""
    assert run_python(script) == ["stop", "7"]


def test_llm_is_imported_on_first_use() -> None:
    """`from nanovllm import LLM` works; only then does torch come in."""
    script = """
import sys
import nanovllm
print("torch" in sys.modules, nanovllm.LLM.__name__, "torch" in sys.modules)
"""
    assert run_python(script) == ["False", "LLM", "True"]
    assert set(nanovllm.__all__) == {"LLM", "SamplingParams"}
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        _ = nanovllm.LLN


def test_the_files_of_the_layout_are_there() -> None:
    expected = """__init__ llm config sampling_params engine/llm_engine engine/sequence
        engine/scheduler engine/block_manager engine/model_runner layers/activation
        layers/attention layers/embed_head layers/layernorm layers/linear layers/rotary_embedding
        layers/sampler models/qwen3 utils/context utils/loader"""
    missing = [name for name in expected.split() if not (PACKAGE / f"{name}.py").is_file()]
    assert not missing


def test_the_scheduling_half_imports_only_itself() -> None:
    """Never layers, models or the runner: the line between CPU and GPU is an import line."""
    for module in SCHEDULING_HALF:
        ours = {name for name in imports(module) if name.startswith("nanovllm")}
        assert ours <= SCHEDULING_HALF, module


@pytest.mark.parametrize(
    ("lower", "uppers"),
    [
        ("nanovllm.layers", ("nanovllm.engine", "nanovllm.models", "nanovllm.llm")),
        ("nanovllm.models", ("nanovllm.engine", "nanovllm.llm")),
        ("nanovllm.utils", ("nanovllm.engine", "nanovllm.models", "nanovllm.layers")),
    ],
)
def test_lower_packages_never_import_upper_ones(lower: str, uppers: tuple[str, ...]) -> None:
    """engine -> models -> layers -> utils, and never back."""
    modules = {name for name in TREES if name.startswith(f"{lower}.")}
    assert modules, lower
    for upper in uppers:
        assert not modules & importers(upper), upper


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        # The tools compare the engine with transformers' own model, and make one of random weights.
        (
            "transformers",
            {
                "nanovllm.utils.hf",
                "nanovllm.tools.equivalences",
                "nanovllm.tools.dummy_model",
            },
        ),
        ("flash_attn", {"nanovllm.layers.attention"}),
        ("triton", {f"nanovllm.layers.{name}" for name in KERNELS}),
        # The former reads the dtype of a folder whose config.json does not tell.
        (
            "safetensors",
            {"nanovllm.utils.hf", "nanovllm.utils.loader", "nanovllm.tools.dummy_model"},
        ),
        ("xxhash", {"nanovllm.engine.block_manager"}),
    ],
)
def test_each_outside_library_has_one_door(library: str, allowed: set[str]) -> None:
    """All guessing about another project's versions happens in one file; triton is where the
    kernels are."""
    assert importers(library) == allowed


def test_every_module_public_class_and_public_function_has_a_docstring() -> None:
    bare = []
    for module, tree in TREES.items():
        public = [node for node in tree.body if isinstance(node, DEFINITIONS)]
        public = [node for node in public if not node.name.startswith("_")]
        bare += [f"{module}.{node.name}" for node in public if not ast.get_docstring(node)]
        bare += [] if ast.get_docstring(tree) else [module]
    assert not bare


def test_files_are_at_most_320_lines_and_functions_60() -> None:
    """But for kernels and their launches: each is one loop, and its parameters alone take 30."""
    long = [f"{path.name}: {len(lines)}" for path, lines in LINES.items() if len(lines) > 320]
    for module, tree in TREES.items():
        limit = 160 if module.split(".")[-1] in KERNELS else 60
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and node.end_lineno - node.lineno + 1 > limit:
                long.append(f"{module}.{node.name}")
    assert not long


def num_lines(paths: list[Path]) -> int:
    """Those that are not blank; comments and docstrings count."""
    return sum(bool(line.strip()) for path in paths for line in LINES[path])


def test_the_engine_can_be_read_in_an_evening() -> None:
    """The tools around it do not count. The Triton kernels are a second evening: with the plain
    torch beside each of them the engine is whole. So is the running of several GPUs, which one
    GPU never enters. Both are counted apart; all three together are about 5,610 lines."""
    engine = [path for path in FILES if not TOOLS & set(path.parts)]
    kernels = [path for path in engine if path.stem in KERNELS]
    several = [path for path in engine if path.stem in SEVERAL_GPUS]
    assert (len(kernels), len(several)) == (len(KERNELS), len(SEVERAL_GPUS))
    assert num_lines([path for path in engine if path not in kernels + several]) <= 3450
    assert num_lines(kernels) <= 1400
    assert num_lines(several) <= 800


def test_the_engine_never_imports_the_tools() -> None:
    """Whoever does not trace pays nothing for it."""
    outside = {name for name in importers("nanovllm.tools") if "tools" not in name.split(".")}
    assert outside == {"nanovllm.trace", "nanovllm.verify"}
    assert not importers("nanovllm.trace") | importers("nanovllm.verify")
