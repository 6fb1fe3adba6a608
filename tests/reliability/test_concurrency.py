"""Several Python threads, and children made by fork, compute at once and get right answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
import minitorch
from kernels.cpu.matmul import blas
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.runtime.targets import cuda

ROOT = Path(__file__).parents[2]
#: Options of calls that run beside each other, each a kernel of its own.
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"is_causal": True}, {"dropout_p": 0.3, "seed": 5}, {"window_size": (9, 3), "softcap": 4.0},
)  # fmt: skip


def asked(number: int, place: Callable[[Any], Any] = np.asarray) -> list[Any]:
    """Return the results of one call, forward and backward, which its number decides."""
    rng, dtype = np.random.default_rng(number), (np.float32, np.float64)[number // 4 % 2]
    seq, options = 70 + 13 * number, OPTIONS[number % 4]
    q, k, v = (place(rng.standard_normal((3, seq, 16)).astype(dtype)) for _ in range(3))
    out, lse = kernels.flash_attention_forward(q, k, v, **options)
    return [out, lse, *kernels.flash_attention_backward(out, q, k, v, out, lse, **options)]


def at_once(work: Callable[[int], Any], numbers: range) -> list[Any]:
    """Do work for each number, in a thread of its own, all beginning together; return the results."""
    results: list[Any] = [None] * len(numbers)
    gate = threading.Barrier(len(numbers))

    def run(place: int) -> None:
        gate.wait(30)
        try:
            results[place] = work(numbers[place])
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(numbers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_threads_that_call_attention_at_once_get_what_one_alone_gets() -> None:
    numbers = range(8)
    alone = [asked(number) for number in numbers]
    for _ in range(3):
        for found, expected in zip(at_once(asked, numbers), alone, strict=True):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)


def trained(seed: int) -> list[Any]:
    """Train a small network of its own and return its weights."""
    rng = np.random.default_rng(seed)
    layers = [
        minitorch.Parameter(minitorch.from_numpy(rng.standard_normal((160, 160)) / 13.0))
        for _ in range(2)
    ]
    optimizer = minitorch.Adam(layers, lr=1e-2)
    inputs = minitorch.from_numpy(rng.standard_normal((300, 160)))
    for _ in range(4):
        optimizer.zero_grad()
        hidden = minitorch.GELU(inputs @ layers[0].value)
        loss = minitorch.softmax_loss(hidden @ layers[1].value, np.arange(300) % 160).mean()
        loss.backward()
        optimizer.step()
    return [layer.value.to_numpy() for layer in layers]


def test_threads_that_train_at_once_get_what_one_alone_gets() -> None:
    """Each its own graph: numbers of variables, the order of backpropagation, products by BLAS."""
    alone = [trained(seed) for seed in range(3)]
    for found, expected in zip(at_once(trained, range(3)), alone, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_blas_has_its_threads_again_when_all_are_done() -> None:
    before = [library.get_num_threads() for library in blas._libraries()]
    inside = threading.Barrier(3)

    def hold(number: int) -> list[int]:
        with blas.one_thread_each():
            inside.wait(30)
            return [library.get_num_threads() for library in blas._libraries()]

    assert at_once(hold, range(3)) == [[1] * len(before)] * 3
    assert [library.get_num_threads() for library in blas._libraries()] == before


# A process of its own: numba chooses its threads once.  Its first kernels are asked for by several
# threads at once; then it forks, from the main thread, while another holds the compiler's lock.
SCRIPT = """
import json, multiprocessing, os, sys, threading, time
sys.path.insert(0, {root!r})
import numpy as np
from kernels.runtime.jit import njit_cached
from numba.core.compiler_lock import global_compiler_lock
from numba.np.ufunc.parallel import threading_layer
from tests.reliability.test_concurrency import asked, at_once, trained

def everything(number):
    return [*asked(number), *trained(number)]

def same(found, expected):
    return all(np.array_equal(a, b) for a, b in zip(found, expected))

def in_child(work):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    said = b""
    while part := os.read(reader, 1 << 16):
        said += part
    return [said.decode(), os.waitpid(child, 0)[1]]

def holding(begun):
    with global_compiler_lock:
        begun.set()
        time.sleep(0.3)

def compiled():
    return njit_cached(lambda x: x + 1, cache=False)(1)

if __name__ == "__main__":
    found = at_once(everything, range(3))
    expected = [everything(number) for number in range(3)]
    begun = threading.Event()
    other = threading.Thread(target=holding, args=(begun,))
    other.start()
    begun.wait()
    forked = {{
        "compiles": in_child(compiled),
        "NumPy only": in_child(lambda: bool((np.ones((300, 300)) @ np.ones((300, 300)) == 300).all())),
        "attention": in_child(lambda: same(everything(1), expected[1])),
    }}
    with multiprocessing.get_context("fork").Pool(2) as pool:
        forked["workers"] = [
            same(a, b) for a, b in zip(pool.map(everything, range(3)), expected)
        ]
    print(json.dumps({{
        "layer": threading_layer(), "forked": forked,
        "at once": [same(a, b) for a, b in zip(found, expected)],
        "afterwards": same(everything(2), expected[2]),
    }}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_no_thread_and_no_forked_child_is_stopped_or_hangs(layer: str, tmp_path: Path) -> None:
    """Numba itself ends the process: with workqueue at the second caller, with OpenMP after a fork."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(root=str(ROOT)))
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "NUMBA_THREADING_LAYER": layer},
    )  # fmt: skip
    if "No threading layer could be loaded" in done.stderr:
        pytest.skip(f"numba has no {layer} here")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "layer": layer,
        "at once": [True] * 3,
        "forked": {
            "compiles": ["2", 0],
            "NumPy only": ["True", 0],
            "attention": ["True", 0],
            "workers": [True] * 3,
        },
        "afterwards": True,
    }


@pytest.mark.cuda
def test_threads_on_streams_of_their_own_get_what_one_alone_gets() -> None:
    """Operands come on a stream of the thread's; kernels wait for it, and share scratch with no one."""

    def on_stream(number: int) -> list[Any]:
        stream = cuda.stream()
        results = asked(number, lambda array: cuda.to_device(array, stream=stream))
        return [to_host(result) for result in results]

    numbers = range(6)
    alone = [[to_host(x) for x in asked(number, to_device)] for number in numbers]
    for _ in range(5):
        for found, expected in zip(at_once(on_stream, numbers), alone, strict=True):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.cuda
def test_half_precision_threads_share_no_counters() -> None:
    """The kernels of 16 bits deal their work by counters in global memory."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((16, 1000, 64)).astype(np.float16) for _ in range(3))

    def called(number: int) -> list[Any]:
        operands = [to_device(array) for array in (q, k, v)]
        out, lse = kernels.flash_attention_forward(*operands, is_causal=bool(number % 2))
        gradients = kernels.flash_attention_backward(
            out, *operands, out, lse, is_causal=bool(number % 2)
        )
        return [to_host(x) for x in (out, lse, *gradients)]

    alone = [called(number) for number in range(2)]
    for _ in range(10):
        for number, found in enumerate(at_once(called, range(4))):
            for one, other in zip(found, alone[number % 2], strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.cuda
def test_a_child_forked_after_cuda_has_begun_gets_an_error_and_no_hang() -> None:
    asked(0, to_device)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asked(0, to_device)
        except RuntimeError:
            code = 7
        finally:
            os._exit(code)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 7
