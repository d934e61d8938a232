"""Train the tiny Qwen3 model that the tests load, from one plain-text file.

    python tests/train_tiny_qwen3.py --text tinyshakespeare.txt --out tests/assets/tiny-qwen3

The text is a play: speeches separated by blank lines, each opened by a "SPEAKER:" line. Its last
tenth is held out: neither the tokenizer nor the weights ever see it. From the rest the script
trains a byte-level BPE tokenizer, cuts the speeches into *documents* (a run of speeches, or the
same run as a ChatML conversation; each ends in <|endoftext|>), trains on windows that open at a
document's first token, and keeps the averaged weights with the best held-out loss. The folder it
writes is in Hugging Face format, weights in bfloat16.

The text is small: the held-out loss turns after some 600 steps. Four things put that off: every
epoch cuts other documents, BPE-dropout spells them in other tokens, dropout on the residual
branches (forward hooks while training; the saved model knows nothing of them), and weight decay.
Then training stops early. BPE-dropout draws from the tokenizers library's own unseeded generator,
so two runs with one seed differ a little; `--bpe-dropout 0` feeds both the same tokens.

A development tool, never imported by the package or by a test. It needs `transformers`.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 2048  # special tokens included
MAX_POSITIONS = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last three ids, in order
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WINDOW_LENGTHS, WINDOW_WEIGHTS = (512, 1024, MAX_POSITIONS), (0.7, 0.2, 0.1)
EVAL_WINDOW = 512


@dataclass(frozen=True)
class Recipe:
    """The knobs of one training run. Every field is a command-line option of the same name."""

    steps: int = 2000  # the length of the schedule; `patience` ends it sooner
    seed: int = 0
    batch_tokens: int = 16384
    lr: float = 2e-3  # peak: linear warm-up, then a cosine down to a twentieth
    warmup_steps: int = 100
    weight_decay: float = 0.3  # matrices only
    dropout: float = 0.1  # of each branch's output, before it joins the residual stream
    bpe_dropout: float = 0.1  # share of merges skipped while encoding training text
    epochs: int = 16  # different encodings of the training text, made up front
    chat_share: float = 0.25  # of documents in ChatML form
    ema_decay: float = 0.995
    eval_every: int = 100
    patience: int = 3  # evaluations without a better held-out loss before training stops


def split_speeches(text: str) -> tuple[list[str], list[str]]:
    """Return the speeches of (the first 90 %, the last 10 %) of `text`, cut between speeches."""
    cut = text.index("\n\n", int(0.9 * len(text)))
    train, held_out = (
        [speech.strip("\n") for speech in part.split("\n\n") if speech.strip()]
        for part in (text[:cut], text[cut:])
    )
    return train, held_out


def train_tokenizer(text: str) -> Tokenizer:
    """Train byte-level BPE on `text`; the special tokens take the last ids, as in Qwen3.

    All 256 bytes are in the vocabulary, so any UTF-8 text survives a round trip. There is no
    normalizer and no token is added in front.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "too little text for this vocabulary"
    return tokenizer


def chat_document(speeches: Sequence[str], rng: random.Random) -> str:
    """Write a run of speeches as a conversation: the assistant speaks every second speech.

    Half of the user's turns name only who is to speak ("ROMEO:"); the answer is then the bare
    speech. The other half are a whole speech, which the answer follows, speaker line and all.
    """
    turns = []
    for user, assistant in zip(speeches[::2], speeches[1::2], strict=False):
        speaker, line_break, body = assistant.partition(":\n")
        if line_break and rng.random() < 0.5:
            user, assistant = speaker + ":", body
        for role, content in ("user", user), ("assistant", assistant):
            turns.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
    return "".join(turns)


def make_documents(speeches: Sequence[str], chat_share: float, rng: random.Random) -> list[str]:
    """Cut the speeches at random into documents of 1 to 64 speeches, mostly short; shuffle them."""
    documents, start = [], 0
    while start < len(speeches):
        length = round(64 ** rng.random())
        run = speeches[start : start + length]
        is_chat = len(run) > 1 and rng.random() < chat_share
        document = chat_document(run, rng) if is_chat else "\n\n".join(run)
        documents.append(document + "<|endoftext|>")
        start += length
    rng.shuffle(documents)
    return documents


def encode_epochs(
    tokenizer: Tokenizer, speeches: Sequence[str], recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (all epochs' tokens in one row, the positions where a window may open)."""
    rng = random.Random(recipe.seed)
    tokenizer.model.dropout = recipe.bpe_dropout or None
    tokens: list[int] = []
    starts: list[int] = []
    for _ in range(recipe.epochs):
        documents = make_documents(speeches, recipe.chat_share, rng)
        for encoding in tokenizer.encode_batch(documents):
            starts.append(len(tokens))
            tokens += encoding.ids
    tokenizer.model.dropout = None  # a property of the saved tokenizer: must not leak into it
    starts = [s for s in starts if s + MAX_POSITIONS < len(tokens)]
    return torch.tensor(tokens), torch.tensor(starts)


def config_dict(tokenizer: Tokenizer) -> dict:
    """Return config.json as both transformers 4.51 and 5.x read it (`rope_theta` on top)."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 1000000,
        "use_sliding_window": False,
        "sliding_window": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "torch_dtype": "bfloat16",
    }


def build_model(tokenizer: Tokenizer, dropout: float) -> Qwen3ForCausalLM:
    """Return a randomly initialised float32 model whose branches drop out while it trains."""
    model = Qwen3ForCausalLM(Qwen3Config(**config_dict(tokenizer))).float()

    def drop(module: nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, dropout, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)
    model.model.embed_tokens.register_forward_hook(drop)
    return model


def loss_of(model: nn.Module, windows: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the next-token cross entropy, in nats, of `windows`: [batch, length + 1] tokens."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits  # [batch, length, vocab]
    return functional.cross_entropy(
        logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction
    )


@torch.no_grad()
def evaluate(
    model: nn.Module, tokens: torch.Tensor, num_bytes: int, window: int = EVAL_WINDOW
) -> tuple[float, float]:
    """Return (nats per token, bits per byte) of a text, predicted in windows that do not overlap.

    `tokens` is one row. Every token but the first is predicted once; a window sees nothing of the
    one before it.
    """
    total = 0.0
    num_full = (len(tokens) - 1) // window
    for first in range(0, num_full, 16):
        last = min(first + 16, num_full)
        rows = [tokens[i * window : (i + 1) * window + 1] for i in range(first, last)]
        total += loss_of(model, torch.stack(rows), "sum").item()
    rest = tokens[num_full * window :]
    if len(rest) > 1:
        total += loss_of(model, rest[None], "sum").item()
    return total / (len(tokens) - 1), total / math.log(2) / num_bytes


def save_folder(out: Path, tokenizer: Tokenizer) -> None:
    """Write every file of the model folder but the weights."""
    end_of_text, _, im_end = (tokenizer.token_to_id(t) for t in SPECIAL_TOKENS)
    stop = {"eos_token_id": [im_end, end_of_text], "pad_token_id": end_of_text}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {
        "config.json": config_dict(tokenizer),
        "generation_config.json": {"do_sample": True, "temperature": 0.8, **stop},
        "tokenizer_config.json": tokenizer_config,
    }
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def save_weights(out: Path, model: Qwen3ForCausalLM) -> None:
    """Write model.safetensors in bfloat16, without the output head: it is the embedding again."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


def make_optimizer(model: nn.Module, recipe: Recipe) -> tuple[torch.optim.AdamW, object]:
    """Return AdamW (decay on matrices, not on norms) and its warm-up-then-cosine schedule."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.98))

    def scale(step: int) -> float:
        progress = min(1.0, step / recipe.steps)
        cosine = 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2
        return min(1.0, (step + 1) / recipe.warmup_steps) * cosine

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def train(text: str, out: Path, recipe: Recipe, device: str) -> None:
    """Train by `recipe`; leave the best averaged weights so far in `out` at any moment."""
    rng = random.Random(recipe.seed)
    torch.manual_seed(recipe.seed)
    train_speeches, held_out_speeches = split_speeches(text)
    train_text, held_out_text = "\n\n".join(train_speeches), "\n\n".join(held_out_speeches)
    tokenizer = train_tokenizer(train_text)
    save_folder(out, tokenizer)

    held_out_bytes = len(held_out_text.encode())
    held_out = torch.tensor(tokenizer.encode(held_out_text).ids, device=device)
    seen_text = train_text[:held_out_bytes]  # as much text that the model did train on
    seen = torch.tensor(tokenizer.encode(seen_text).ids, device=device)
    tokens, starts = (t.to(device) for t in encode_epochs(tokenizer, train_speeches, recipe))
    print(f"{len(tokens):,} training tokens, {len(held_out):,} held-out tokens", flush=True)

    model = build_model(tokenizer, recipe.dropout).to(device).train()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema_decay)).eval()
    optimizer, schedule = make_optimizer(model, recipe)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)

    best, stale, began = math.inf, 0, time.perf_counter()
    for step in range(1, recipe.steps + 1):
        length = rng.choices(WINDOW_LENGTHS, WINDOW_WEIGHTS)[0]
        picks = torch.randint(len(starts), (max(1, recipe.batch_tokens // length),), device=device)
        windows = tokens[starts[picks, None] + torch.arange(length + 1, device=device)]
        loss = loss_of(model, windows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        averaged.update_parameters(model)
        if step % recipe.eval_every and step != recipe.steps:
            continue
        nats, bits = evaluate(averaged, held_out, held_out_bytes)
        seen_nats, seen_bits = evaluate(averaged, seen, len(seen_text.encode()))
        print(
            f"step {step:5d}  batch {loss.item():.3f}  train {seen_nats:.4f} nats/token "
            f"{seen_bits:.4f} bits/byte  held-out {nats:.4f} nats/token {bits:.4f} bits/byte  "
            f"{time.perf_counter() - began:.0f} s{'  *' if nats < best else ''}",
            flush=True,
        )
        if nats < best:
            best, stale = nats, 0
            save_weights(out, averaged.module)
        elif (stale := stale + 1) == recipe.patience:
            break

    report(out, tokenizer, held_out, held_out_bytes)


def report(out: Path, tokenizer: Tokenizer, held_out: torch.Tensor, num_bytes: int) -> None:
    """Load the saved folder again and print its held-out loss and two completions."""
    device = held_out.device
    saved = AutoModelForCausalLM.from_pretrained(out).float().to(device).eval()
    for window in (EVAL_WINDOW, MAX_POSITIONS):
        nats, bits = evaluate(saved, held_out, num_bytes, window)
        print(f"saved, window {window}: held-out {nats:.4f} nats/token, {bits:.4f} bits/byte")
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 0}):
        prompt = torch.tensor([tokenizer.encode("ROMEO:").ids], device=device)
        completion = saved.generate(prompt, max_new_tokens=100, **sampling)[0].tolist()
        print(f"--- {sampling}\n{tokenizer.decode(completion, skip_special_tokens=False)}")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="the plain-text file")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    for name, field in Recipe.__dataclass_fields__.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=field.type, default=field.default, help="%(default)s")
    options = vars(parser.parse_args())
    text, out = options.pop("text").read_text(encoding="utf-8"), options.pop("out")
    train(text, out, Recipe(**options), "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
