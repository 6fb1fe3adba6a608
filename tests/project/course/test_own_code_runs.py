"""What a student has not written does not work: nothing else computes it behind the student's back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from course.markers import Region, replaced, sources
from course.starter_trees import write_tree

pytestmark = pytest.mark.slow
#: Each call must come through a region of its task, and stop there when that region alone is empty.
PROGRAM = """
import builtins, sys
from functools import partial
import numpy as np

passed, covered, empty = set(), set(), None

def region(key):
    passed.add(key)
    if key == empty:
        raise NotImplementedError(key)

builtins.region = region
import minitorch
from minitorch import CudaBackend, FastBackend, Module, Scalar, SimpleBackend, operators

# The simulator runs each thread of a block as one of Python's.
minitorch.cuda_ops.THREADS_PER_BLOCK = minitorch.cuda_ops.REDUCE_THREADS = 2

def stops(task, *calls):
    global empty
    for number, call in enumerate(calls):
        passed.clear()
        call()
        own = sorted(key for key in passed if key.split()[0] == task)
        assert own, f"{task}, call {number}: works without the task"
        for key in own:
            empty = key
            try:
                call()
            except Exception as error:
                assert key in str(error), f"{task}, call {number}: {error!r}"
            else:
                raise SystemExit(f"{task}, call {number}: works without {key}")
            finally:
                empty = None
        covered.update(own)

stops("0.1", *(partial(getattr(operators, name), 0.5) for name in
               "id neg sigmoid relu log exp inv".split()),
      *(partial(getattr(operators, name), 0.5, 2.0) for name in
        "mul add lt eq max is_close log_back inv_back relu_back".split()))
stops("0.3", lambda: operators.negList([1.0]), lambda: operators.addLists([1.0], [2.0]),
      lambda: operators.sum([1.0]), lambda: operators.prod([1.0]))
stops("0.4", Module().train, Module().eval, Module().named_parameters, Module().parameters)

a, b = Scalar(0.5), Scalar(2.0)
ONE = [Scalar.log, Scalar.exp, Scalar.sigmoid, Scalar.relu, lambda x: -x, lambda x: x / 2.0]
TWO = [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x / y,
       lambda x, y: x < y, lambda x, y: x > y, lambda x, y: x == y]
values = [*(partial(f, a) for f in ONE), *(partial(f, a, b) for f in TWO)]
stops("1.1", partial(minitorch.central_difference, operators.mul, 0.5, 2.0))
stops("1.2", *values)
gradients = [lambda f=f: f().backward() for f in values]
stops("1.3", *gradients)
stops("1.4", *gradients)

def tensors(backend, *shape):
    return [minitorch.tensor(np.full(shape, 0.5), backend, True) for _ in range(2)]

for backend, loops, product in ((SimpleBackend, "2.3", ""), (FastBackend, "3.1", "3.2"),
                                (CudaBackend, "3.3", "3.4")):
    x, y = tensors(backend, 2, 3)
    row = minitorch.tensor(np.ones(3), backend, True)
    stops("2.1", lambda: x.permute(1, 0), lambda: x + row, lambda: list(x._tensor.indices()))
    stops("2.2", lambda: x + row, lambda: minitorch.shape_broadcast((1,), (2,)))
    one = [x.sigmoid, x.relu, x.log, x.exp, x.sum, partial(x.permute, 1, 0)]
    two = [lambda: x * y, lambda: x < y, lambda: x == y]
    stops("2.3", *one, *two, lambda: x.is_close(y))
    stops("2.4", *(lambda f=f: f().sum().backward() for f in (*one, *two)))
    stops(loops, *one[:4], *two, lambda: -x, lambda: x + row, lambda: x.sum(1), lambda: x.mean(),
          lambda: x.permute(1, 0).contiguous(), lambda: x.all())
    if product:
        stops(product, lambda: x @ y.permute(1, 0), lambda: (x @ row.view(3, 1)).sum().backward())
    image, weight = tensors(backend, 1, 1, 2, 2)
    line, kernel = image.view(1, 2, 2), weight.view(1, 2, 2)
    stops("4.1", lambda: minitorch.conv1d(line, kernel),
          lambda: minitorch.conv1d(line, kernel).sum().backward())
    stops("4.2", lambda: minitorch.conv2d(image, weight),
          lambda: minitorch.conv2d(image, weight).sum().backward())
    stops("4.3", lambda: minitorch.tile(image, (2, 2)), lambda: minitorch.avgpool2d(image, (2, 2)))
    maximum = lambda: minitorch.max(image, 3)
    stops("4.4", maximum, lambda: maximum().sum().backward(), lambda: minitorch.argmax(image, 3),
          lambda: minitorch.maxpool2d(image, (2, 2)), lambda: minitorch.softmax(image, 3),
          lambda: minitorch.softmax(image, 0), lambda: minitorch.logsoftmax(image, 3),
          lambda: minitorch.dropout(image, 0.5),
          lambda: minitorch.softmax_loss(image.view(2, 2), np.zeros(2, int)))
x, y = tensors(CudaBackend, 2, 2)
stops("3.3", lambda: minitorch.sum_practice(x.view(4)))
stops("3.4", lambda: minitorch.mm_practice(x, y))

for backend, task in ((SimpleBackend, "5.3"), (FastBackend, "5.3"), (CudaBackend, "5.7")):
    q, k = tensors(backend, 1, 1, 2, 4)
    stops(task, lambda: q.flash_attention(k, k), lambda: q.flash_attention(k, k, is_causal=True))
    layer = minitorch.TransformerLayer(4, 1, backend=backend, p_dropout=0.0)
    stops("5.10", lambda: layer(q.view(1, 2, 4)))
model = minitorch.DecoderLM(3, 4, 1, 4, backend=FastBackend, n_layer=1, p_dropout=0.0)
ids = np.array([[1, 2]])
stops("5.10", lambda: model.generate([1], 2), lambda: model.loss(ids, ids), lambda: model(ids))
missing = [key for key in sys.argv[1:] if key[0] in "01234" and key not in covered]
assert not missing, f"no call comes through {missing}"
"""


def test_an_operation_stops_at_each_region_that_is_not_written(tmp_path: Path) -> None:
    tree, keys = tmp_path / "tree", list[str]()

    def name_regions(file: str) -> None:
        text = (tree / file).read_text(encoding="utf-8")
        lines = text.split("\n")

        def body(region: Region) -> list[str]:
            keys.append(f"{region.key.task} {file} {region.key.name} {region.key.number}")
            return [f"{region.indent}region({keys[-1]!r})", *lines[region.start : region.stop]]

        (tree / file).write_text(replaced(text, file, body), encoding="utf-8")

    write_tree(5, tree, lambda region: None)  # solved
    for file in sources(tree):
        if not file.startswith("tests/"):
            name_regions(file)
    # Without compilation, so that a region may be emptied while the program runs.
    environment = {
        **os.environ, "NUMBA_ENABLE_CUDASIM": "1", "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": ".",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *keys], env=environment,
        cwd=tree, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
