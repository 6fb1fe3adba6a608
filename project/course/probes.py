"""What the grader calls of a student's code in modules 0 to 4, with drawn arguments; see ``probing``."""

# ruff: noqa: B023 - a function that is yielded is called before the next one
from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np

Rng = np.random.Generator
#: Names, each with a function that is called at once.
Probes = Iterator[tuple[str, Callable[[], Any]]]


def after(call: Callable[..., Any], out: Any, *args: Any) -> Callable[[], Any]:
    """Return a function that makes a call and returns what the call has written to."""
    return lambda: (call(*args), out)[1]


def refused(call: Callable[[], Any], kind: Any) -> str:
    """Tell whether a call raises an error of a kind; what is not written raises its own."""
    try:
        call()
    except NotImplementedError:
        raise
    except kind:
        return "refused"
    return "accepted"


def drawn(rng: Rng, *shape: int) -> Any:
    """Draw an array of positive numbers."""
    return rng.uniform(0.5, 2.0, shape)


# -- modules 0 and 1 -----------------------------------------------------------------------------


def operators(rng: Rng) -> Probes:
    o = import_module("minitorch.operators")
    for name in ("id", "neg", "sigmoid", "relu", "exp", "log", "inv"):
        xs = rng.normal(0.0, 3.0, 6)
        xs = np.append(abs(xs), 0.0) if name == "log" else xs
        xs[0] = np.nan if name == "relu" else xs[0]
        yield name, lambda: [getattr(o, name)(x) for x in xs.tolist()]
    for name in ("mul", "add", "lt", "eq", "max", "is_close", "log_back", "inv_back", "relu_back"):
        xs = rng.normal(0.0, 3.0, 20)
        xs[0] = 0.0 if name != "inv_back" else xs[0]
        xs = abs(xs) if name == "log_back" else xs
        ys = xs + rng.choice([0.0, 0.005, -0.05, 2.0, -3.0], 20)
        xs[1], ys[2] = (np.nan, np.nan) if name == "max" else (xs[1], ys[2])
        yield name, lambda: [getattr(o, name)(*xy) for xy in np.c_[xs, ys].tolist()]


def property_tests(rng: Rng, task: str) -> Probes:
    """Probe whether a student's property tests notice a broken operator, and accept a right one."""
    mutants = import_module("tests.course.test_property_mutants")
    broken: dict[str, list[Any]] = {} if task == "0.3" else {"test_other": [*mutants.ANY.items()]}
    for index in rng.permutation(len(mutants.BROKEN)):
        test, *operator, _ = mutants.BROKEN[index]
        if (test in mutants.MARKS) == (task == "0.3"):
            broken[test] = [operator]  # of several, the last one

    def notices(test: str, replaced: Any, is_wrong: bool) -> bool:
        (name, wrong), patch = replaced, import_module("pytest").MonkeyPatch()
        right = getattr(mutants.operators, name)
        operator = wrong if is_wrong else lambda *args: right(*args)
        return mutants.notices(test, name, operator, patch)

    for test, operators in broken.items():
        order = rng.permutation([False, True]).tolist()
        yield (
            test,
            lambda: [
                any(notices(test, one, is_wrong) for one in operators[: None if is_wrong else 1])
                for is_wrong in order
            ],
        )


def lists(rng: Rng) -> Probes:
    o = import_module("minitorch.operators")
    xs, ys, (a, b, *_) = rng.normal(size=(3, 5)).tolist()
    yield "map", lambda: list(o.map(lambda x: a * x + b)(xs))
    yield "zipWith", lambda: list(o.zipWith(lambda x, y: a * x - y)(xs, ys))
    unequal = [
        lambda n=n: [*o.zipWith(o.add)(xs, ys[:n])] for n in rng.permutation([3, 5]).tolist()
    ]
    yield "zipWith of any lengths", lambda: [refused(call, ValueError) for call in unequal]
    yield "reduce", lambda: o.reduce(lambda x, y: a * x - y, b)(xs)
    yield "negList", lambda: list(o.negList(xs))
    yield "addLists", lambda: list(o.addLists(xs, ys))
    yield "sum", lambda: [o.sum(xs), o.sum([])]
    yield "prod", lambda: [o.prod(xs), o.prod([])]
    yield from property_tests(rng, "0.3")


def modules(rng: Rng) -> Probes:
    m = import_module("minitorch")

    def tree(depth: int) -> Any:
        module, letters = m.Module(), rng.permutation(list("pqr"))[: rng.integers(1, 4)]
        for letter in letters:
            setattr(module, f"{letter}{rng.integers(99)}", m.Parameter(float(rng.normal())))
        for letter in rng.permutation(list("ab"))[: 2 * depth]:
            setattr(module, f"{letter}{rng.integers(99)}", tree(depth - 1))
        return module

    def all_of(module: Any) -> list[Any]:
        children = module._modules.values()
        return [module, *(one for child in children for one in all_of(child))]

    root = tree(2)
    everything = all_of(root)

    def switched(method: str, before: bool, place: int) -> Any:
        for module in everything:
            module.training = before
        getattr(everything[place], method)()
        return [float(module.training) for module in everything]

    yield "named_parameters", lambda: [[name, p.value] for name, p in root.named_parameters()]
    yield "parameters", lambda: [p.value for p in root.parameters()]
    for method in ("train", "eval"):
        place = rng.choice([i for i, module in enumerate(everything) if module._modules])
        yield method, lambda: [switched(method, method == "eval", at) for at in (0, place)]


def numerical_derivative(rng: Rng) -> Probes:
    a, x, y, step = drawn(rng, 4).tolist()
    derivative = import_module("minitorch.autodiff").central_difference
    for arg in range(2):
        yield (
            f"argument {arg}",
            lambda: derivative(lambda x, y: a * x**3 * y + y**4, x, y, arg=arg, epsilon=step),
        )


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "a + b": lambda a, b: a + b,
    "a - b": lambda a, b: a - b,
    "a * b": lambda a, b: a * b,
    "a / b": lambda a, b: a / b,
    "-a": lambda a, b: -a,
    "a < b": lambda a, b: (a < b) + (b < a) + (a < a),
    "a > b": lambda a, b: (a > b) - (b > a),
    "a == b": lambda a, b: (a == b) + (a == a),
    "log": lambda a, b: a.log(),
    "exp": lambda a, b: a.exp(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "relu": lambda a, b: a.relu() + (-b).relu() + (b - a).relu(),
}


def scalars(rng: Rng) -> Probes:
    scalar = import_module("minitorch").Scalar
    for name, operation in ARITHMETIC.items():
        a, b = drawn(rng, 2).tolist()
        yield name, lambda: [(x := operation(scalar(a), scalar(b))) * scalar(b), x.is_leaf()]


def chain_rule(rng: Rng) -> Probes:
    scalar = import_module("minitorch").Scalar
    a, b, x, y, d = rng.normal(size=5).tolist()

    class Curve(import_module("minitorch.scalar_functions").ScalarFunction):
        @staticmethod
        def forward(ctx: Any, x: float, y: float) -> float:
            ctx.save_for_backward(x)
            return a * x * x + b * y

        @staticmethod
        def backward(ctx: Any, d_output: float) -> tuple[float, float]:
            return 2.0 * a * ctx.saved_values[0] * d_output, b * d_output

    class Forgetful(Curve):
        @staticmethod
        def backward(ctx: Any, d_output: float) -> Any:
            return d_output

    makers = [
        lambda: scalar(x),
        *(lambda f=f: f.apply(scalar(x), scalar(y)) for f in (Forgetful, Curve)),
    ]
    order = rng.permutation(3).tolist()
    yield "chain_rule", lambda: [*map(list, makers[2]().chain_rule(d))]
    yield (
        "chain_rule without enough derivatives",
        lambda: [refused(lambda: [*makers[i]().chain_rule(d)], AssertionError) for i in order],
    )


def backpropagation(rng: Rng) -> Probes:
    scalar = import_module("minitorch").Scalar
    order = import_module("minitorch.autodiff").topological_sort

    def derivatives(f: Callable[..., Any], *values: float) -> Any:
        variables = [scalar(x) for x in values]
        f(*variables).backward()
        return [v.derivative for v in variables]

    def chain(x: Any) -> Any:  # each variable is used more than once
        total = x
        for _ in range(length):
            total = total * x + total
        return total

    for name, operation in ARITHMETIC.items():
        a, b = drawn(rng, 2).tolist()
        yield name, lambda: derivatives(lambda x, y: operation(x, y) * x * y + x * x, a, b)
    length, (a, b) = int(rng.integers(3, 9)), drawn(rng, 2).tolist()
    yield "a variable that is used more than once", lambda: derivatives(chain, a)
    yield "topological_sort", lambda: list(order(chain(scalar(b))))


# -- modules 2 to 4: tensors ---------------------------------------------------------------------


def laid_out(rng: Rng, array: Any, backend: str = "SimpleBackend", order: Any = None) -> Any:
    """Return a tensor whose dimensions lie in memory in this order; a drawn one is not the usual one."""
    m, usual = import_module("minitorch"), np.arange(array.ndim)
    while order is None:
        drawn_order = rng.permutation(usual)
        order = None if array.ndim > 1 and (drawn_order == usual).all() else drawn_order
    stored = np.ascontiguousarray(array.transpose(order))
    return m.from_numpy(stored.transpose(np.argsort(order)), getattr(m, backend))


def tensor_data(rng: Rng) -> Probes:
    t = import_module("minitorch.tensor_data")
    shape, strides, index = *rng.integers(2, 5, (2, 3)), rng.integers(0, 9, 5)
    buffer, size = np.zeros(5, np.int32), int(shape.prod())
    data = t.TensorData(np.arange(size), tuple(shape.tolist()))
    order = np.roll(range(3), rng.integers(1, 3)).tolist()
    yield "index_to_position", lambda: t.index_to_position(index, strides * index[0])
    yield "to_index", after(t.to_index, buffer, int(rng.integers(size)), shape, buffer)
    yield "permute", lambda: [(y := data.permute(*order)).shape, y.strides]


def broadcasting(rng: Rng) -> Probes:
    t = import_module("minitorch.tensor_data")
    big, buffer = rng.integers(2, 9, 4), np.zeros(5, np.int32)
    small = np.where(rng.permutation([True, rng.random() < 0.5, False]), 1, big[1:])
    index, other = rng.integers(1, big), np.where(small == 1, big[1:], 1)
    shapes = [tuple(x.tolist()) for x in (big, small, other)]
    empty = [((shapes[0][0], 1), (1, 0)), ((0,), (shapes[0][0], 1))][int(rng.integers(2))]
    args = index, big, small, buffer  # of which only the last one is written to
    yield "broadcast_index", after(t.broadcast_index, [index, buffer], *args)
    yield (
        "shape_broadcast",
        lambda: [
            t.shape_broadcast(*pair) for pair in (shapes[:2], shapes[1:], shapes[::-1][:2], empty)
        ],
    )
    pairs = [(shapes[0], (n,)) for n in rng.permutation([shapes[0][-1], 11]).tolist()]
    yield (
        "shapes that do not fit",
        lambda: [refused(lambda: t.shape_broadcast(*pair), t.IndexingError) for pair in pairs],
    )


def minus(x: float, y: float) -> float:
    return x - 2.0 * y


def loops(rng: Rng, module: str, backend: str = "SimpleBackend") -> Probes:
    """Probe map, zip and reduce of a backend, on operands in any layout."""
    ops, o = (import_module(f"minitorch.{name}") for name in (module, "operators"))
    cuda = backend == "CudaBackend"
    for what, order in (("alike", [1, 0]), ("of one shape", [0, 1]), ("broadcast", None)):
        a, b = drawn(rng, 3, 4), drawn(rng, 3, 4)
        a, b = (a[:, :1], b[0]) if what == "broadcast" else (a, b)
        out, b = (laid_out(rng, x, backend) for x in (np.zeros((3, 4)), b))
        a = laid_out(rng, a, backend, order)
        size = [int(rng.integers(8, 12))] if cuda else []  # what lies beyond is not written
        for make, fn, operands in ((ops.tensor_map, o.neg, (a,)), (ops.tensor_zip, minus, (a, b))):
            run = make(fn)[2, 8] if cuda else make(fn)
            triples = [x for operand in operands for x in operand.tuple()]
            yield f"{make.__name__}, {what}", after(run, out, *out.tuple(), *size, *triples)
    for dim in range(1 + (not cuda)):
        shape = [int(rng.integers(9, 20)), 3]
        a = laid_out(rng, drawn(rng, *shape[:: 1 - 2 * dim]), backend)
        out = laid_out(rng, drawn(rng, *[1, 3][:: 1 - 2 * dim]), backend)
        run = ops.tensor_reduce(o.add)[3, 8] if cuda else ops.tensor_reduce(o.add)
        size, start = ([out.size], [float(rng.normal())]) if cuda else ([], [])
        args = (*out.tuple(), *size, *a.tuple(), dim, *start)
        yield f"tensor_reduce, {dim}", after(run, out, *args)


TENSORS: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b,
    "sigmoid": lambda a, b: a.sigmoid(),
    "relu": lambda a, b: (a - b).relu(),
    "log": lambda a, b: a.log(),
    "exp": lambda a, b: a.exp(),
    "sum": lambda a, b: a.sum(1) + b.sum(0),
    "lt": lambda a, b: (a < b) * b,
    "eq": lambda a, b: (a == b) + (a == a) * a,
    "permute": lambda a, b: a.permute(2, 0, 1) * b.permute(2, 0, 1),
}


def tensors(rng: Rng) -> Probes:
    m = import_module("minitorch")
    yield from loops(rng, "tensor_ops")
    for name, f in TENSORS.items():
        a, b = drawn(rng, 2, 2, 3, 2)
        yield name, lambda: f(m.tensor(a), m.tensor(b))
    a, b = drawn(rng, 2, 2, 3, 2)
    near = a + np.where(a < b, 1e-3, 0.1)
    yield "is_close", lambda: m.tensor(a).is_close(m.tensor(near))


def gradients(f: Callable[..., Any], weights: Any, *arrays: Any) -> list[Any]:
    """Return the gradients of a weighted sum of what a function of tensors returns."""
    m = import_module("minitorch")
    inputs: list[Any] = [m.tensor(x, requires_grad=True) for x in arrays]
    out = f(*inputs)
    out.backward(m.tensor(weights.reshape(-1)[: out.size].reshape(out.shape)))
    return [x.grad for x in inputs]


def tensor_gradients(rng: Rng) -> Probes:
    def with_result(f: Callable[..., Any], *arrays: Any) -> list[Any]:
        results: list[Any] = []  # that backward leaves as they are

        def loss(a: Any, b: Any) -> Any:
            results.append(f(a, b))
            return results[0] + a.sum() * b.sum()

        return gradients(loss, *arrays) + results

    for name, f in TENSORS.items():
        arrays = drawn(rng, 3, 2, 3, 2)
        yield name, lambda: with_result(f, arrays[2], *arrays[:2])


def products(rng: Rng) -> Probes:
    run = import_module("minitorch.fast_ops").tensor_matrix_multiply
    for batches in ((2, 2), (2, 1), (1, 2)):
        n, k, m = rng.integers(2, 6, 3).tolist()
        shapes = (2, n, m), (batches[0], n, k), (batches[1], k, m)
        order = [2, 1, 0] if batches == (2, 2) else None
        out, a, b = (laid_out(rng, drawn(rng, *shape), order=order) for shape in shapes)
        yield f"batches {batches}", after(run, out, *out.tuple(), *a.tuple(), *b.tuple())


def cuda_loops(rng: Rng) -> Probes:
    yield from loops(rng, "cuda_ops", "CudaBackend")
    run = import_module("minitorch.cuda_ops").jit_sum_practice[2, 32]
    total, a = (laid_out(rng, x, "CudaBackend") for x in (np.zeros(2), drawn(rng, 40)))
    storages = (x._tensor._storage for x in (total, a))
    yield "jit_sum_practice", after(run, total, *storages, int(rng.integers(33, 40)))


def cuda_products(rng: Rng) -> Probes:
    ops = import_module("minitorch.cuda_ops")
    n, tile = int(rng.integers(2, 4)), ops.THREADS_PER_BLOCK
    for name, batches, most in (("large", 1, tile), ("batches", 2, 0)):
        rows, k = (most + rng.integers(1, 4, 2)).tolist()
        shapes = (batches, rows, n), (1, rows, k), (batches, k, n)
        out, a, b = (laid_out(rng, drawn(rng, *shape), "CudaBackend") for shape in shapes)
        run = ops.tensor_matrix_multiply[(-(-rows // tile), 1, batches), (tile, tile, 1)]
        args = (*out.tuple(), out.size, *a.tuple(), *b.tuple())
        yield f"product, {name}", after(run, out, *args)
    flat = [laid_out(rng, drawn(rng, n * n), "CudaBackend") for _ in range(3)]
    run = ops.jit_mm_practice[1, (n, n)]
    yield "jit_mm_practice", after(run, flat[0], *(x._tensor._storage for x in flat), n)


def convolution(rng: Rng, dims: int) -> Probes:
    run = getattr(import_module("minitorch.fast_conv"), f"tensor_conv{dims}d")
    sizes = rng.permutation(3)[:dims] + 3  # no square, and once wide and once high
    for reverse, size in ((False, sizes), (True, sizes[::-1])):
        kernel = rng.integers(2, 4, dims)
        shapes = (2, 3, *(size - rng.integers(0, 2, dims))), (2, 2, *size), (3, 2, *kernel)
        out, a, w = (laid_out(rng, drawn(rng, *shape)) for shape in shapes)
        args = (*out.tuple(), out.size, *a.tuple(), *w.tuple(), reverse)
        yield f"reverse={reverse}", after(run, out, *args)


def pooling(rng: Rng) -> Probes:
    m, kernel = import_module("minitorch"), tuple(rng.integers(2, 4, 2).tolist())
    image = drawn(rng, 1, 2, kernel[0] * 2, kernel[1] * 3)
    yield "tile", lambda: m.nn.tile(m.tensor(image), kernel)
    yield "avgpool2d", lambda: m.nn.avgpool2d(m.tensor(image), kernel)


def softmaxes(rng: Rng) -> Probes:
    m = import_module("minitorch")
    nn, tensor = m.nn, m.tensor
    dim, x, image = int(rng.integers(2)), drawn(rng, 3, 4), drawn(rng, 1, 2, 4, 6)
    large, rate, value = 500.0 * x, float(rng.choice([0.2, 0.4, 0.6])), float(drawn(rng))
    large[0] = -np.inf

    def dropped() -> Any:
        y = nn.dropout(tensor(np.full(4000, value)), rate).to_numpy()
        return [y.max(), round(10.0 * float((y == 0.0).mean()))]

    yield "max", lambda: nn.max(tensor(x), dim)
    yield "gradient of max", lambda: gradients(lambda x: nn.max(x, dim), image, x)
    yield "argmax", lambda: nn.argmax(tensor(x), dim)
    yield "maxpool2d", lambda: nn.maxpool2d(tensor(image), (2, 3))
    yield "softmax", lambda: nn.softmax(tensor(x), dim)
    yield "softmax of large numbers", lambda: nn.softmax(tensor(large), 1)
    yield "logsoftmax", lambda: nn.logsoftmax(tensor(50.0 * x), dim)
    yield "dropout", dropped
    yield (
        "dropout of nothing and of everything",
        lambda: [nn.dropout(tensor(x), *more) for more in ((0.0,), (0.7, True), (1.0,))],
    )


PROBES: dict[str, Callable[[Rng], Probes]] = {
    "0.1": operators, "0.2": lambda rng: property_tests(rng, "0.2"), "0.3": lists, "0.4": modules,
    "1.1": numerical_derivative, "1.2": scalars, "1.3": chain_rule, "1.4": backpropagation,
    "2.1": tensor_data, "2.2": broadcasting, "2.3": tensors, "2.4": tensor_gradients,
    "3.1": lambda rng: loops(rng, "fast_ops"), "3.2": products,
    "3.3": cuda_loops, "3.4": cuda_products,
    "4.1": lambda rng: convolution(rng, 1), "4.2": lambda rng: convolution(rng, 2),
    "4.3": pooling, "4.4": softmaxes,
}  # fmt: skip
