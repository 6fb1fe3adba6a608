"""Tokens per second of GPT-2 small that continues one text greedily, beside Hugging Face's transformers.

    python project/bench_generation.py                  a CPU: float32, against transformers' eager model
    python project/bench_generation.py --device cuda    a GPU: bfloat16, also against one that is compiled
    python project/bench_generation.py --publish        also write docs/results/DEVICE/generation.json

The weights are random and the same for all: a folder is written and read by each.  A continuation is 64
tokens after a prompt of 32, and its time includes the prompt.  Each round runs every contestant once, and
a ratio is the median of our speed over the other's within the rounds.  On a GPU, transformers also runs
with a static cache and torch.compile.  Without transformers only ours is timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from bench.measuring import (
    command_line,
    interleaved,
    name_of,
    published_file,
    ratio,
    spread,
    timing_note,
    write_record,
)

import minitorch
from kernels.runtime.targets import why_no_cuda

Continue = Callable[[], list[int]]
OURS, EAGER, COMPILED = "ours", "transformers, eager", "transformers, static cache, compiled"
#: Arguments of DecoderLM: GPT-2 small, and a tiny model to try the script with, whose times mean nothing.
SMALL: dict[str, Any] = {
    "n_vocab": 50_257, "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_layer": 12,
    "middle_dim": 3072,
}  # fmt: skip
TINY: dict[str, Any] = {
    "n_vocab": 61,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 64,
    "n_layer": 2,
    "middle_dim": 64,
}
PROMPT, TOKENS = 32, 64
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


def ours(folder: str, device: str, prompt: list[int], count: int) -> Continue:
    """Return our continuation of a prompt."""
    backend = minitorch.CudaBackend if device == "cuda" else minitorch.FastBackend
    model = minitorch.DecoderLM.from_pretrained(folder, backend, precision=DTYPES[device])
    return lambda: model.generate(prompt, count, temperature=0)


def theirs(
    folder: str, device: str, prompt: list[int], count: int, compiled: bool
) -> Continue | str:
    """Return the continuation of transformers, or why there is none."""
    try:
        import torch  # type: ignore[import-not-found]
        import transformers  # type: ignore[import-not-found]
    except ImportError as error:
        return f"{error.name} is not installed (pip install torch transformers)"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, DTYPES[device])
    )
    model = model.to(device).eval()
    options: dict[str, Any] = {}
    if compiled:  # with a static cache, generate compiles each step for CUDA graphs
        options["cache_implementation"] = "static"
    ids = torch.tensor([prompt], device=device)

    @torch.no_grad()
    def run() -> list[int]:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0, **options,
        )  # fmt: skip
        return out[0].tolist()

    return run


def measured(folder: str, device: str, sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return tokens per second of each contestant, and our ratio to each."""
    prompt = np.random.default_rng(0).integers(0, sizes["n_vocab"], PROMPT).tolist()
    count = min(TOKENS, sizes["n_positions"] - PROMPT)
    found: dict[str, Continue | str] = {
        OURS: ours(folder, device, prompt, count),
        EAGER: theirs(folder, device, prompt, count, False),
    }
    if device == "cuda":
        found[COMPILED] = theirs(folder, device, prompt, count, True)
    runs: dict[str, Continue] = {n: run for n, run in found.items() if not isinstance(run, str)}
    texts = {name: run() for name, run in runs.items()}
    # On either device the last token is on the host when a continuation ends.
    times = interleaved(runs, "cpu", 0.0, least=rounds)
    return {
        "tokens_per_second": {
            name: spread([count / seconds for seconds in taken]) for name, taken in times.items()
        },
        "ratios": {name: ratio(times[name], times[OURS]) for name in times if name != OURS},
        "same_tokens": {name: text == texts[OURS] for name, text in texts.items() if name != OURS},
        "why_not": {name: run for name, run in found.items() if isinstance(run, str)},
    }


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--rounds", type=int, default=7, metavar="N", help="(default: %(default)s)")
    add("--quick", action="store_true", help="a tiny model: what is printed is no figure")
    add("--json", metavar="FILE", help="also write the figures there")
    add("--publish", action="store_true", help="write them to docs/results")
    args = parser.parse_args(argv)
    if args.device == "cuda" and (reason := why_no_cuda()):
        parser.error(f"--device cuda cannot run: {reason}")
    sizes = TINY if args.quick else SMALL
    with tempfile.TemporaryDirectory() as folder:
        minitorch.manual_seed(0)
        model = minitorch.DecoderLM(
            **sizes,
            p_dropout=0.0,
            tie_weights=True,
            backend=minitorch.FastBackend,
            dtype=np.float32,
        )
        model.save_pretrained(folder)
        del model
        result = measured(folder, args.device, sizes, args.rounds)
    print(f"{name_of(args.device)}, {DTYPES[args.device]}")
    for name, speed in result["tokens_per_second"].items():
        beside = result["ratios"].get(name)
        ours_to = f"; ours is {beside['median']:.2f} times as fast" if beside else ""
        print(f"{name}: {speed['median']:,.1f} tokens/s{ours_to}")
    for name, reason in result["why_not"].items():
        print(f"no {name}: {reason}")
    path = published_file(args.device, "generation") if args.publish else args.json
    if path:
        command = command_line("project/bench_generation.py", argv)
        write_record(
            path, command, name_of(args.device), timing=timing_note("cpu"), dtype=DTYPES[args.device],
            **sizes, prompt=PROMPT, tokens=TOKENS, **result,
        )  # fmt: skip


if __name__ == "__main__":
    main()
