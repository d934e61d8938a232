"""Complete a few prompts with a Qwen3 model; print what came out, and how fast.

    python example.py                                 the bundled tiny model, which writes plays
    python example.py --temperature 0 "JULIET:"       the same, greedily, from a prompt of yours
    python example.py --model ~/Qwen3-0.6B "Who was Euclid?"

A model is taken for a chat model if its tokenizer has a chat template and it is not the bundled
one, which has a template too, but is better at continuing a play than at answering questions. A
chat model is shown each prompt as a user's message, any other model continues it as plain text.
"""

import argparse
import sys
from pathlib import Path
from textwrap import indent
from time import perf_counter

from nanovllm import LLM, SamplingParams

BUNDLED_MODEL = Path(__file__).resolve().parent / "tests" / "assets" / "tiny-qwen3"
PLAY = ["ROMEO:\n", "First Citizen:\nWe are all resolved", "KING RICHARD III:\nMy lord,"]
QUESTIONS = ["Introduce yourself in two sentences.", "Which planets have rings?"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="default: some for the model")
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        default=BUNDLED_MODEL,
        help="folder in Hugging Face format; default: the bundled tiny model",
    )
    parser.add_argument("--tp", metavar="N", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--max-model-len",
        metavar="N",
        type=int,
        default=4096,
        help="longest prompt and completion; on a CPU large models want less: 2048",
    )
    parser.add_argument("--temperature", metavar="T", type=float, default=0.6, help="0 is greedy")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=128, help="per completion")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    is_bundled = args.model.resolve() == BUNDLED_MODEL
    prompts = args.prompts or (PLAY if is_bundled else QUESTIONS)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)

    with LLM(
        args.model,
        tensor_parallel_size=args.tp,
        enforce_eager=args.enforce_eager,
        max_model_len=args.max_model_len,
    ) as llm:
        is_chat = llm.tokenizer.chat_template is not None and not is_bundled
        start = perf_counter()
        if is_chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            # A Qwen3 model would think first, for longer than a short completion.
            direct = {"enable_thinking": False}
            outputs = llm.chat(conversations, params, chat_template_kwargs=direct)
        else:
            outputs = llm.generate(prompts, params)
        seconds = perf_counter() - start

    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\nPrompt:\n{indent(prompt, '    ')}")
        print(f"Completion:\n{indent(output['text'], '    ')}")
        print(f"Finish reason: {output['finish_reason']}")
    num_tokens = sum(len(output["token_ids"]) for output in outputs)
    print(f"\n{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tok/s")


if __name__ == "__main__":
    try:
        run(parse_args())
    except ValueError as error:  # a bad setting, folder or prompt; the message says what to do
        sys.exit(f"example.py: {error}")
