"""Sets of sequences with classes: drawn once from a seed, written to an .npz file, and read from it."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import signal
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from minitorch.training.model_files import replacing

#: Parts of a set.
PARTS = ("train", "valid", "test")
#: Examples that a process draws at a time, and how many such chunks are not worth other processes.
CHUNK, FEW_CHUNKS = 200, 10

#: ``(random, number)`` to the elements of an example and its class.
Draw = Callable[[np.random.Generator], tuple[npt.NDArray[np.uint8], int]]


class Examples(NamedTuple):
    """Examples in classes.

    Attributes:
        X: (count, length), uint8; a shorter example is filled up with 0.
        y: (count,), the class of each.
    """

    X: npt.NDArray[np.uint8]
    y: npt.NDArray[np.int64]


def draw_set(
    draw: Draw, counts: Mapping[str, int], length: int, seed: int, desc: str
) -> dict[str, Examples]:
    """Draw the parts of a set on all cores, with a progress bar.

    Each example has a random generator of its own, so that it depends neither on the sizes of the parts nor
    on the number of cores.

    Args:
        draw: Returns the elements and the class of one example; other processes import it.
        counts: Examples of each part.
        length: Most elements of an example.
        seed: Of everything that is random.
        desc: What the progress bar shows.
    """
    chunks = [
        (part, start, min(start + CHUNK, count))
        for part, count in counts.items()
        for start in range(0, count, CHUNK)
    ]
    drawn: dict[str, list[Examples]] = {part: [] for part in counts}
    draw_one = partial(_draw_chunk, draw, length, seed)
    with ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(total=sum(counts.values()), desc=desc, unit="example", delay=1)
        )
        done: Iterable[Examples] = map(draw_one, chunks)
        if len(chunks) > FEW_CHUNKS:
            context = multiprocessing.get_context("spawn")  # a fork would copy locks of threads
            pool = stack.enter_context(ProcessPoolExecutor(mp_context=context))
            done = pool.map(draw_one, chunks)
        for (part, start, stop), examples in zip(chunks, done, strict=True):
            drawn[part].append(examples)
            bar.update(stop - start)
    return {
        part: Examples(*map(np.concatenate, zip(*examples, strict=True)))
        for part, examples in drawn.items()
    }


def fresh_batches(
    draw: Draw, length: int, seed: int, done: int, batch: int, processes: int
) -> Generator[Examples, None, None]:
    """Draw batches of training examples without end, each example once, in processes that work ahead.

    An example depends on its number alone, so that a training that goes on gets the examples that it would
    have had.

    Args:
        draw: As for :func:`draw_set`.
        length: As for :func:`draw_set`.
        seed: As for :func:`draw_set`.
        done: Number of earlier batches.
        batch: Examples of a batch.
        processes: That draw; 0 draws in this one, where the training waits for it.
    """
    draw_one = partial(_draw_chunk, draw, length, seed)
    chunks = (("train", i * batch, (i + 1) * batch) for i in itertools.count(done))
    if processes == 0:
        yield from map(draw_one, chunks)
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches all processes; the training ends its own after the step.
    pool = ProcessPoolExecutor(processes, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    ahead: deque[Future[Examples]] = deque()
    try:
        for chunk in chunks:
            ahead.append(pool.submit(draw_one, chunk))
            if len(ahead) > 2 * processes:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _draw_chunk(draw: Draw, length: int, seed: int, chunk: tuple[str, int, int]) -> Examples:
    """Draw the examples of a part from one number to another."""
    part, start, stop = chunk
    X, y = np.zeros((stop - start, length), np.uint8), np.zeros(stop - start, np.int64)
    for i in range(stop - start):
        elements, y[i] = draw(np.random.default_rng([seed, PARTS.index(part), start + i]))
        X[i, : len(elements)] = elements
    return Examples(X, y)


def read_or_make(
    path: str | Path, recipe: Mapping[str, Any], make: Callable[[], dict[str, Examples]]
) -> dict[str, Examples]:
    """Return a set from its file, which is made first if there is none; exit with one line if it differs.

    Args:
        path: Of the .npz file.
        recipe: What the set was made from; it is kept in the file.
        make: Makes the set.
    """
    path, text = Path(path), json.dumps(dict(recipe), sort_keys=True)
    if path.exists():
        return _read(path, text)
    parts = make()
    arrays = {f"{kind}_{part}": getattr(parts[part], kind) for part in parts for kind in ("X", "y")}
    with replacing(path) as file:  # a run that is killed leaves no half a file under this name
        np.savez_compressed(file, recipe=np.array(text), **arrays)
    return parts


def _read(path: Path, recipe: str) -> dict[str, Examples]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = str(file["recipe"])
            if found != recipe:
                sys.exit(
                    f"{path} was made from {found}, and this run asks for {recipe}; pass another path, or "
                    "delete the file"
                )
            parts = [part for part in PARTS if f"X_{part}" in file]
            return {part: Examples(file[f"X_{part}"], file[f"y_{part}"]) for part in parts}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(f"{path}: not a set of sequences ({error}); delete the file to make it again")
