"""Serve a language model over HTTP: completions with streaming, and a page to chat in a browser.

python project/serve.py                            a small random model, to try it
python project/serve.py runs/gpt                   a run of train_gpt.py
python project/serve.py DIR                        a GPT-2 or a Llama of Hugging Face
python project/serve.py gpt2-small                 a preset of train_gpt.py, with random weights
python project/serve.py DIR --backend cuda --pages 4096 --batch 64
curl -N localhost:8000/v1/completions -d '{"prompt": "The ", "max_tokens": 40, "stream": true}'
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":  # before the imports, which take a second
    ENDED = b"the server has ended before it was ready\n"
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, ENDED), os._exit(130)))

import argparse
from types import FrameType
from typing import Any

from common.command_line import COUNT, FROM_ZERO, NOT_NEGATIVE, OneLineParser, number
from data.text import PROMPT
from training.gpt_files import build, load_run
from training.gpt_options import with_defaults
from training.gpt_presets import PRESETS, characters_of
from training.loop_options import BACKENDS
from training.script_helpers import check_backend

import minitorch

PORT = number(int, lambda x: 0 <= x <= 65535, "a whole number from 0 to 65535")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; exit with one line and code 2 if it cannot be."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "model", nargs="?", default="toy", metavar="MODEL",
        help=f"a checkpoint, a folder, or one of {', '.join(PRESETS)} (default: %(default)s)",
    )  # fmt: skip
    parser.choice("--backend", sorted(BACKENDS), "fast")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    parser.option("--port", PORT, 8000, "from 0 to 65535; 0 takes a free one")
    parser.option("--pages", COUNT, 512, "of keys and values")
    parser.option("--page-size", COUNT, 16, "tokens of a page")
    parser.option("--batch", COUNT, 16, "texts that are written at the same time at most")
    parser.option("--chunk", COUNT, 256, "tokens of prompts that are read in a step at most")
    parser.option("--queue", FROM_ZERO, 64, "requests that wait at most; others get status 429")
    parser.option("--grace", NOT_NEGATIVE, 10.0, "seconds that running requests get at the end")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="the same bits of attention in every batch"
    )
    return parser.parse_args(argv)


def load(name: str, backend: str) -> tuple[minitorch.DecoderLM, dict[str, Any]]:
    """Return a model and its configuration; exit with one line if there is none."""
    if name not in PRESETS:
        return load_run(name, backend)
    preset = PRESETS[name]
    letters = characters_of(preset["vocabulary"])
    config = with_defaults(
        {
            "tie_weights": False, "prompt": PROMPT, "dropout": 0.0, "attention": "flash",
            **preset, "characters": letters,
        }
    )  # fmt: skip
    print(f"{name}: the weights are random; pass a run of train_gpt.py for a trained model")
    return build(config, backend), config


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    try:
        import uvicorn
        from serving.api import Served, make_app
    except ImportError as error:
        sys.exit(f"{error.name} is missing; pip install -e '.[serve]'")
    from serving.worker import Worker

    model, config = load(args.model, args.backend)
    model.eval()
    try:
        engine = minitorch.Engine(
            model, pages=args.pages, page_size=args.page_size, batch=args.batch, chunk=args.chunk,
            batch_invariant=args.batch_invariant,
        )  # fmt: skip
        print("compiling the model, which takes seconds the first time", flush=True)
        list(engine.tokens(engine.submit([0, 0], 2)))  # so that no request waits for it
    except (MemoryError, ValueError) as error:
        sys.exit(str(error) or f"no memory for {args.pages} pages; pass fewer --pages")
    worker = Worker(engine, args.queue)

    class Server(uvicorn.Server):
        """Refuses requests from the first signal on, and ends when all that runs has its answer."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if worker.is_ending:
                worker.end(0.0)
                return
            print(f"ending, for at most {args.grace:g} s; Ctrl-C ends it at once", flush=True)
            worker.end(args.grace)

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or worker.join(0.0)

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            port = self.servers[0].sockets[0].getsockname()[1]
            print(f"http://{args.host}:{port}   Ctrl-C ends it", flush=True)

    app = make_app(Served(args.model, worker, config, model.eos_token_id))
    options: Any = {"log_level": "warning", "timeout_graceful_shutdown": 5}
    Server(uvicorn.Config(app, args.host, args.port, **options)).run()


if __name__ == "__main__":
    main()
