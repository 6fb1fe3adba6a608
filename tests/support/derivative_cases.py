"""Every differentiable operation of tensors, as a function of float64 tensors of drawn sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import minitorch
from minitorch import Tensor, TensorBackend
from minitorch.attention.approximate.performer import performer
from minitorch.attention.approximate.reformer import reformer
from minitorch.models.rotary import Rotary
from minitorch.modules_basic import layer_norm, lookup

#: A function, and the shape of each argument: a letter is a size that is drawn, a digit is that size.
Case = tuple[Callable[..., Tensor], list[str]]


def squared(x: Tensor) -> Tensor:
    """Return x * x, so that a linear function is part of a curved one."""
    return x * x


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return x * y."""
    return x * y


def seeded(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a random function that draws the same numbers in each call."""

    def call(*xs: Tensor) -> Tensor:
        minitorch.manual_seed(3)
        return f(*xs)

    return call


def attention(**options: Any) -> Callable[..., Tensor]:
    """Return attention with options; a fourth argument is the floating mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        found = q.flash_attention(k, v, *mask, **options)
        return (
            product(found[0], found[1].view(*found[1].shape, 1))
            if isinstance(found, tuple)
            else found
        )

    return attend


ELEMENTWISE: dict[str, Case] = {
    "neg": (lambda a: -squared(a), ["nm"]),
    "add": (lambda a, b: squared(a + b), ["n1", "1m"]),
    "sub": (lambda a, b: squared(a - b), ["m", "nm"]),
    "mul": (product, ["n1", "k1m"]),
    "div": (lambda a, b: a / (squared(b) + 0.5), ["nm", "m"]),
    "inverse": (lambda a: 1.0 / (squared(a) + 0.5), ["nm"]),
    "cube": (lambda a: a**3, ["nm"]),
    "power of a positive base": (lambda a: (squared(a) + 0.5) ** 1.5, ["nm"]),
    "exponent": (lambda a: minitorch.full((1,), 2.0, a.backend, False) ** a, ["nm"]),
    "sigmoid": (lambda a: a.sigmoid(), ["nm"]),
    "relu": (lambda a: a.relu() * a, ["nm"]),
    "log": (lambda a: (squared(a) + 0.5).log(), ["nm"]),
    "exp": (lambda a: a.exp(), ["nm"]),
    "tanh": (lambda a: a.tanh(), ["nm"]),
    "elu": (lambda a: a.elu(), ["nm"]),
    "silu": (minitorch.silu, ["nm"]),
    "GELU": (minitorch.GELU, ["nm"]),
    "less": (lambda a, b: (a < b) * a * b, ["nm", "nm"]),
    "equal": (lambda a, b: ((a == b) + a) * b, ["nm", "nm"]),
    "where": (lambda a, b: a.where(a > b, squared(b)) * a, ["nm", "m"]),
    "sqrt": (lambda a: (squared(a) + 0.5).sqrt(), ["nm"]),
    "abs": (lambda a: abs(a) * a, ["nm"]),
    "clamp": (lambda a, b: squared(squared(a).clamp(b, 0.5)), ["nm", "m"]),
    "masked_fill": (lambda a, b: squared(a).masked_fill(a > b, 2.0) * b, ["nm", "m"]),
    "to float32 and back": (lambda a: squared(a.to("float32").to("float64")) * 0.0 + squared(a), ["nm"]),
}  # fmt: skip
SHAPES: dict[str, Case] = {
    "sum": (lambda a: a.sum(1) * a, ["nm"]),
    "mean": (lambda a: squared(a).mean(), ["nm"]),
    "sum over two dimensions": (lambda a: squared(a.sum((0, 2), False)), ["nmk"]),
    "variance": (lambda a: a.var(0), ["nm"]),
    "unbiased variance": (lambda a: a.var(unbiased=True), ["nm"]),
    "maxima": (lambda a: squared(a).max(1).values * a.min(1, True).values, ["nm"]),
    "topk": (lambda a: squared(a).topk(2, 0).values, ["nm"]),
    "transpose": (lambda a: squared(a).transpose(0, -1), ["nmk"]),
    "max": (lambda a: minitorch.max(squared(a), 1), ["nm"]),
    "permute": (lambda a: squared(a).permute(1, 2, 0), ["nmk"]),
    "contiguous": (lambda a: squared(a).T.contiguous() * a.T, ["nm"]),
    "view": (lambda a: squared(a.reshape(-1)), ["nm"]),
    "gather": (lambda a: squared(a).gather(1, np.array([[0, 1, 1], [2, 1, 0]])), ["23"]),
    "scatter_add": (lambda a, b: squared(squared(a).scatter_add(0, np.array([[0], [2]]), b)), ["3n", "2n"]),
    "cumsum": (lambda a: squared(a.cumsum(1, exclusive=True)), ["nm"]),
    "sort": (lambda a: squared(a).sort(1)[0], ["nm"]),
    "slice": (lambda a: squared(a)[:, ::2] * a[0:1, 1:2], ["n4"]),
    "index": (lambda a: squared(a)[[0, 1, 0]], ["2m"]),
    "split": (lambda a: product(*squared(a).split(2, 1)), ["n4"]),
    "cat": (lambda a, b: squared(minitorch.cat([a, b, a], 1)), ["nm", "nk"]),
    "stack": (lambda a, b: squared(minitorch.stack([a, b])), ["nm", "nm"]),
    "avgpool2d": (lambda a: squared(minitorch.avgpool2d(a, (2, 1))), ["n14m"]),
    "maxpool2d": (lambda a: minitorch.maxpool2d(squared(a), (2, 2)), ["n142"]),
}  # fmt: skip
LAYERS: dict[str, Case] = {
    "matmul": (lambda a, b: a @ b, ["nk", "km"]),
    "matmul of batches": (lambda a, b: a @ b, ["21nk", "3km"]),
    "einsum": (lambda a, b, c: minitorch.einsum("iji,jk,k->ki", a, b, c), ["nmn", "mk", "k"]),
    "matrix cube": (lambda a: a @ a @ a, ["nn"]),
    "conv1d": (lambda a, b: minitorch.conv1d(squared(a), b), ["nk5", "mk2"]),
    "conv2d": (lambda a, b: minitorch.conv2d(a, squared(b)), ["nk43", "mk22"]),
    "softmax": (lambda a: minitorch.softmax(squared(a), 1), ["nm"]),
    "softmax over columns": (lambda a: minitorch.softmax(a, 0), ["nm"]),
    "logsoftmax": (lambda a: minitorch.logsoftmax(a, 1), ["nm"]),
    "logsumexp": (lambda a: minitorch.logsumexp(a, 1), ["nm"]),
    "softmax_loss": (lambda a: minitorch.softmax_loss(a, np.array([1, 0])), ["23"]),
    "cross_entropy": (
        lambda a: minitorch.cross_entropy(a, np.array([[1], [-100]]), label_smoothing=0.2), ["231"]),
    "linear": (minitorch.linear, ["nk", "km"]),
    "linear with GELU": (lambda x, w, b: minitorch.linear(x, w, b, True), ["2nk", "km", "m"]),
    "layer_norm": (lambda x, g, b: layer_norm(x, g, b, 1e-2), ["n5", "5", "5"]),
    "rms_norm": (lambda x, g: minitorch.rms_norm(x, g, 1e-2), ["nm", "m"]),
    "dropout": (seeded(lambda x: minitorch.dropout(squared(x), 0.4)), ["nm"]),
    "residual_layer_norm": (
        seeded(lambda x, r, g, b: product(*minitorch.residual_layer_norm(x, r, g, b, 1e-2, 0.3))),
        ["n5", "n5", "5", "5"],
    ),
    "linear_cross_entropy": (
        lambda x, w, b: minitorch.linear_cross_entropy(x, w, np.array([1, 0, 2]), b), ["3k", "k4", "4"]),
    "embedding": (lambda t: squared(lookup(t, np.array([[0, 2], [1, 2]]))), ["3m"]),
    "rotary": (lambda x: squared(Rotary(4, 8)(x, 1)), ["nm24"]),
    "checkpoint": (
        lambda a, b: minitorch.checkpoint(lambda x: (x * b).tanh() * x, squared(a)), ["nm", "m"]),
}  # fmt: skip
ATTENTION: dict[str, Case] = {
    "attention": (attention(), ["2nk", "2mk", "2m3"]),
    "causal attention with lse": (attention(is_causal=True, return_lse=True), ["12n3", "12n3", "12n3"]),
    "attention with a mask": (attention(softcap=2.0, enable_gqa=True), ["2n3", "1m3", "1m3", "nm"]),
    "attention with dropout": (attention(dropout_p=0.3, seed=5), ["2n3", "2m3", "2m3"]),
    "performer": (lambda q, k, v: performer(q, k, v, num_features=4), ["1n2", "1m2", "1m3"]),
    "reformer": (lambda q, v: reformer(q, q, v, chunk=2, rounds=1, seed=0), ["142", "142"]),
}  # fmt: skip
CASES = {**ELEMENTWISE, **SHAPES, **LAYERS, **ATTENTION}
#: Where a backend has its own functions or loops: the simple one runs all but layers by the plain ones.
ON_BACKENDS: list[tuple[TensorBackend, list[str]]] = [
    (minitorch.FastBackend, [*CASES]),
    (minitorch.SimpleBackend, [*ELEMENTWISE, *SHAPES, "matmul", "conv1d"]),
    (
        minitorch.CudaBackend,
        ["mul", "sum", "matmul", "conv1d", "softmax", "dropout", "residual_layer_norm"],
    ),
]


def drawn(
    case: Case, sizes: dict[str, int], seed: int, backend: TensorBackend
) -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    """Return the function, its arguments, and a direction for each, in the other order of memory."""
    function, shapes = case
    rng = np.random.default_rng(seed)

    def numbers(order: Any) -> list[Tensor]:
        found = ([sizes.get(sign) or int(sign) for sign in shape] for shape in shapes)
        arrays = (np.array(rng.uniform(-1.0, 1.0, shape), order=order) for shape in found)
        return [minitorch.from_numpy(array, backend) for array in arrays]

    return function, numbers("C"), numbers("F")


def central(f: Callable[..., Tensor], xs: list[Tensor], ts: list[Tensor]) -> npt.NDArray[Any]:
    """Return the derivative of a function in a direction, by central differences."""
    above, below = (
        f(*(x + t * step for x, t in zip(xs, ts, strict=True))) for step in (1e-5, -1e-5)
    )
    return (above.to_numpy() - below.to_numpy()) / 2e-5


def inner(xs: Any, ys: Any) -> float:
    """Return the inner product of two lists of tensors."""
    return sum(float((x.to_numpy() * y.to_numpy()).sum()) for x, y in zip(xs, ys, strict=True))
