"""What is refused: with an error that says what was given and what to do, before anything changes.
Every refusal is followed by proof that the process, the engine and its other requests are well."""

import gc
import multiprocessing
import shutil
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, edit_json, edit_tensors, make_checkpoint, random_ids
from recording import GREEDY, Watch, add

from nanovllm import LLM, SamplingParams
from nanovllm.engine import kv_cache, model_runner
from nanovllm.models.qwen3 import Qwen3ForCausalLM


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.fixture(scope="module")
def llm(good: Path) -> LLM:
    return start(good, max_model_len=64, num_kvcache_blocks=16)


def start(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"kvcache_block_size": 4, "device": "cpu", **settings})


def refusal(error: type[Exception], call: Callable[[], object]) -> str:
    """The message of the error that `call` must raise; its traceback, which would keep objects
    alive, is let go."""
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    return str(caught.value)


def assert_says(message: str, *words: str) -> None:
    for word in words:
        assert word in message


# --- start-up -------------------------------------------------------------------------------------


def remains() -> tuple[set[threading.Thread], list[Any], int, torch.dtype]:
    """What a half-started engine could leave: threads, processes, models, torch's default dtype."""
    gc.collect()
    models = sum(type(thing) is Qwen3ForCausalLM for thing in gc.get_objects())
    threads = set(threading.enumerate())
    return threads, multiprocessing.active_children(), models, torch.get_default_dtype()


def break_json(path: Path) -> None:
    path.write_text("{")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


# what happened -> (how to bring it about, words of the message)
DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing folder": (shutil.rmtree, ["does not exist", "local folder in Hugging Face format"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["no config.json", "model folder"]),
    "broken config": (lambda f: break_json(f / "config.json"), ["config.json", "cannot be read"]),
    "not Qwen3": (
        lambda f: edit_json(f / "config.json", model_type="llama"),
        ["model_type 'llama'", "only 'qwen3' is supported"],
    ),
    "missing tensor": (
        lambda f: edit_tensors(f / WEIGHTS, **{"model.norm.weight": None}),
        ["does not match config.json", "missing model.norm.weight", "unexpected none"],
    ),
    "extra tensor": (
        lambda f: edit_tensors(f / WEIGHTS, **{"model.extra.weight": torch.zeros(2)}),
        ["does not match config.json", "missing none", "unexpected model.extra.weight"],
    ),
    "wrong shape": (
        lambda f: edit_tensors(f / WEIGHTS, **{"model.norm.weight": torch.zeros(65)}),
        [WEIGHTS, "'model.norm.weight'", "(65,)", "config.json implies (64,)"],
    ),
    "truncated weights": (
        lambda f: truncate(f / WEIGHTS),
        [WEIGHTS, "cannot be read", "is the download complete?"],
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ["no *.safetensors", "no weights to load"]),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        ["no tokenizer.json", "copy the tokenizer files of the model into the folder"],
    ),
    "broken tokenizer": (lambda f: break_json(f / "tokenizer.json"), ["cannot read the tokenizer"]),
    "broken generation config": (
        lambda f: break_json(f / "generation_config.json"),
        ["generation_config.json", "cannot be read"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_named_and_nothing_is_half_started(
    folder: Path, good: Path, damage: str
) -> None:
    before = remains()
    bring_about, words = DAMAGES[damage]
    bring_about(folder)
    assert_says(refusal(ValueError, partial(start, folder)), str(folder), *words)
    assert remains() == before
    with start(good, num_kvcache_blocks=4) as llm:
        assert len(llm.generate([[1]], SamplingParams(max_tokens=2, **GREEDY), use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"max_num_seq": 4}, TypeError, ["unknown setting 'max_num_seq'", "mean 'max_num_seqs'?"]),
        ({"max_num_seqs": 0}, ValueError, ["max_num_seqs must be in 1..", "got 0"]),
        ({"max_model_len": "1024"}, TypeError, ["max_model_len must be an int >= 2", "'1024'"]),
        ({"device": "gpu"}, ValueError, ["device must be one of auto, cuda, cpu; got 'gpu'"]),
    ],
)
def test_case_39_bad_settings(
    good: Path, settings: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    before = remains()
    assert_says(refusal(error, partial(start, good, **settings)), *words)
    assert remains() == before


def test_cuda_without_a_gpu(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = remains()
    message = refusal(ValueError, partial(start, good, device="cuda"))
    assert_says(message, "device='cuda'", "no GPU", "use device='cpu' or 'auto'")
    assert remains() == before


def test_a_pool_too_small_names_the_max_model_len_that_fits(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number it names does fit, and one more does not."""
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4  # K and V, layers, positions, KV heads, head_dim, float32
    monkeypatch.setattr(kv_cache, "CPU_POOL_BYTES", 40 * block_bytes + 1)
    before = remains()
    for too_long in (512, 161):
        message = refusal(ValueError, partial(start, good, max_model_len=too_long))
        assert_says(message, f"less than max_model_len={too_long}", "(40 blocks of 4)")
        assert_says(message, "set max_model_len to at most 160, or raise gpu_memory_utilization")
    assert remains() == before
    with start(good, max_model_len=160) as llm:
        params = SamplingParams(max_tokens=50, **GREEDY)
        (output,) = llm.generate([random_ids(150)], params, use_tqdm=False)
        assert len(output["token_ids"]) == 10


def test_a_start_that_fails_leaves_no_weights(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while its error is kept: whoever follows its advice needs the memory for the next."""
    parameters: list[weakref.ref] = []
    load = model_runner.load_weights

    def noting(model: torch.nn.Module, folder: str) -> None:
        parameters.extend(map(weakref.ref, model.parameters()))
        load(model, folder)

    monkeypatch.setattr(model_runner, "load_weights", noting)
    with pytest.raises(ValueError) as kept:
        start(good, num_kvcache_blocks=2**31 - 1, kvcache_block_size=2**20)
    assert len(parameters) > 10 and not any(ref() is not None for ref in parameters), kept


def test_a_pool_that_no_memory_holds(good: Path) -> None:
    before = remains()
    largest = {"num_kvcache_blocks": 2**31 - 1, "kvcache_block_size": 2**20}
    message = refusal(ValueError, partial(start, good, **largest))
    assert_says(message, "a KV pool of 2147483647 blocks", "GiB", "lower num_kvcache_blocks")
    assert remains() == before


# --- requests -------------------------------------------------------------------------------------

BAD_PROMPTS: list[tuple[Any, type[Exception], list[str]]] = [
    ([], ValueError, ["the prompt has no token ids: give at least one"]),
    ("", ValueError, ["the prompt '' tokenizes to nothing: give some text"]),
    ([1, -1], ValueError, ["token id -1 is outside the vocabulary 0..511"]),
    ([512], ValueError, ["token id 512 is outside the vocabulary 0..511"]),
    # The bundled tokenizer knows 2,048 ids, this model 512.
    ("<|im_end|>", ValueError, ["token id 2047 is outside the vocabulary 0..511"]),
    (None, TypeError, ["a prompt must be text or a list of token ids, got None"]),
    (7, TypeError, ["a prompt must be text or a list of token ids, got 7"]),
    ([1, 2.0], TypeError, ["token ids must be ints, got 2.0"]),
    ([1, None], TypeError, ["token ids must be ints, got None"]),
    ([True], TypeError, ["token ids must be ints, got True"]),
    ([[1, 2]], TypeError, ["token ids must be ints, got [1, 2]"]),
    ([1] * 64, ValueError, ["the prompt has 64 tokens", "max_model_len=64", "shorten it"]),
    ([1] * 500, ValueError, ["the prompt has 500 tokens", "max_model_len=64", "shorten it"]),
]


def snapshot(llm: LLM) -> list[Any]:
    """Everything about the scheduler that a refused request could change."""
    scheduler = llm.scheduler
    manager = scheduler.block_manager
    return [
        [repr(seq) for queue in (scheduler.waiting, scheduler.running) for seq in queue],
        list(manager.free_block_ids),
        set(manager.used_block_ids),
        dict(manager.hash_to_block_id),
    ]


def assert_refused_unharmed(
    llm: LLM, call: Callable[[], object], error: type[Exception], words: list[str]
) -> None:
    """`call` is refused while one request decodes and one waits; both end as if it had not been
    made."""
    alone = [random_ids(9, seed=1), random_ids(6, seed=2)]
    params = SamplingParams(max_tokens=5, **GREEDY)
    expected = [output["token_ids"] for output in llm.generate(alone, params, use_tqdm=False)]
    decoding = add(llm, alone[0], max_tokens=5)
    llm.step()
    waiting = add(llm, alone[1], max_tokens=5)
    before = snapshot(llm)
    assert_says(refusal(error, call), *words)
    assert snapshot(llm) == before
    Watch(llm).run()
    assert [decoding.completion_token_ids, waiting.completion_token_ids] == expected


@pytest.mark.parametrize(("prompt", "error", "words"), BAD_PROMPTS)
def test_case_05_a_bad_prompt_is_not_added(
    llm: LLM, prompt: Any, error: type[Exception], words: list[str]
) -> None:
    assert_refused_unharmed(llm, partial(llm.add_request, prompt), error, words)


@pytest.mark.parametrize(("prompt", "error", "words"), BAD_PROMPTS)
def test_case_05_one_bad_prompt_refuses_the_whole_batch(
    llm: LLM, prompt: Any, error: type[Exception], words: list[str]
) -> None:
    """The message says which one it is."""
    batch = [[1, 2, 3], [4], prompt, [5, 6]]
    params = SamplingParams(max_tokens=3)
    call = partial(llm.generate, batch, params, use_tqdm=False)
    assert_refused_unharmed(llm, call, error, ["prompt 2: ", *words])


ONE = SamplingParams(max_tokens=3)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "words"),
    [
        ([], None, ValueError, ["prompts is empty: give at least one prompt"]),
        ("", None, ValueError, ["prompt 0: the prompt '' tokenizes to nothing"]),
        (None, None, TypeError, ["prompts must be a list of texts or token-id lists, got None"]),
        ([1, 2, 3], None, TypeError, ["prompt 0: a prompt must be text or a list", "got 1"]),
        ([[1], [2], [3]], [ONE, ONE], ValueError, ["3 prompts but 2 sampling_params", "one for"]),
        ([[1]], [], ValueError, ["1 prompts but 0 sampling_params"]),
        ([[1]], {"max_tokens": 3}, TypeError, ["sampling_params must be SamplingParams, got {"]),
        ([[1] * 9999 + ["a"]], None, TypeError, ["must be ints, got 'a'", "unnested"]),
        ([{"prompt": "x" * 999}], None, TypeError, ["got {'prompt': 'xxxxxxxxxxxx...xxxx"]),
        ([[1], [2]], [ONE, 3], TypeError, ["prompt 1: sampling_params must be SamplingParams"]),
    ],
)
def test_case_39_arguments_of_generate(
    llm: LLM, prompts: Any, params: Any, error: type[Exception], words: list[str]
) -> None:
    call = partial(llm.generate, prompts, params, use_tqdm=False)
    assert_refused_unharmed(llm, call, error, words)


def test_case_01_a_request_that_can_never_fit_is_refused_when_added(good: Path) -> None:
    """Blocks of 4, a pool of 2: 8 + 5 tokens have 12 positions, the pool 8. One token, which
    needs no slot of its own, is still to be had; so is 4 + 5."""
    with start(good, num_kvcache_blocks=2) as llm:
        five = SamplingParams(max_tokens=5, **GREEDY)
        words = ["a prompt of 8 tokens with max_tokens=5", "12 KV positions", "8 (2 blocks of 4)"]
        words += ["lower max_tokens or enlarge the pool"]
        before = snapshot(llm)
        assert_says(refusal(ValueError, partial(llm.add_request, [1] * 8, five)), *words)
        call = partial(llm.generate, [[2], [1] * 8], five, use_tqdm=False)
        assert_says(refusal(ValueError, call), "prompt 1: ", *words)
        assert snapshot(llm) == before
        watch = Watch(llm)
        fitting = [add(llm, [1] * 8, max_tokens=1), add(llm, [1] * 4, max_tokens=5)]
        watch.run()
        assert [seq.num_completion_tokens for seq in fitting] == [1, 5]
