"""Continue a text with the weights of a GPT-2 or a Llama in the format of Hugging Face.

python project/generate.py DIR --prompt "The attention of"
python project/generate.py DIR --prompt "Once" --temperature 0              the most likely tokens
python project/generate.py DIR --prompt "Once" --top-k 50 --top-p 0.95 --max-tokens 200 --seed 1
python project/generate.py DIR --prompt "Once" --backend cuda --precision bfloat16

DIR holds config.json, model.safetensors and tokenizer.json.  Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from common.command_line import (
    COUNT,
    FROM_ZERO,
    NOT_NEGATIVE,
    SHARE,
    OneLineParser,
    replace_unprintable,
)
from training.loop_options import BACKENDS
from training.script_helpers import check_backend, ends_in_one_line

import minitorch
from minitorch.backends.matmul_precision import PRECISIONS
from minitorch.models.pretrained import read_tokenizer
from minitorch.training.model_files import CheckpointError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; exit with one line and code 2 if it cannot be."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", help="the folder of the model")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    parser.option("--max-tokens", COUNT, 100, "tokens to add at most")
    parser.option("--temperature", NOT_NEGATIVE, 0.8, "divisor of the logits; 0 is greedy")
    parser.option("--top-k", COUNT, None, "sample among so many of the most likely tokens")
    parser.option(
        "--top-p", SHARE, 1.0, "sample among the fewest most likely tokens with this share"
    )
    parser.option("--seed", FROM_ZERO, 0, "of the sampling")
    parser.choice("--backend", sorted(BACKENDS), "fast")
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="of the weights (default: as they are stored)"
    )
    return parser.parse_args(argv)


def load(args: argparse.Namespace) -> tuple[minitorch.DecoderLM, Any]:
    """Return the model and its tokenizer; exit with one line if the folder lacks one of them."""
    try:
        model = minitorch.DecoderLM.from_pretrained(
            args.folder, BACKENDS[args.backend], precision=args.precision
        )
        return model, read_tokenizer(args.folder, model.n_vocab)
    except (CheckpointError, TypeError, ValueError) as error:
        sys.exit(str(error))


def write(model: minitorch.DecoderLM, tokenizer: Any, args: argparse.Namespace) -> None:
    """Print the prompt and its continuation as it comes, and then the speed."""
    from tokenizers.decoders import DecodeStream

    prompt = tokenizer.encode(args.prompt).ids
    if not prompt:
        sys.exit("--prompt has no token; pass at least one word")
    print(args.prompt, end="", flush=True)
    # A letter may consist of several tokens; the stream returns text when it is complete.
    stream = DecodeStream(skip_special_tokens=True)
    for token in prompt:
        stream.step(tokenizer, token)
    tokens = model.continuation(
        prompt, args.max_tokens, args.temperature, args.seed, top_k=args.top_k, top_p=args.top_p
    )
    times = [time.perf_counter()]
    for token in tokens:
        times.append(time.perf_counter())
        if token == model.eos_token_id:
            break
        print(stream.step(tokenizer, token) or "", end="", flush=True)
    first, rest, count = times[1] - times[0], times[-1] - times[1], len(times) - 2
    speed = f", then {count / rest:,.1f} tokens/s" if count else ""
    print(f"\n\n{len(prompt)} tokens of the prompt and the first new one in {first:.2f} s{speed}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    replace_unprintable()
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    with ends_in_one_line("--max-tokens"):
        write(*load(args), args)


if __name__ == "__main__":
    main()
