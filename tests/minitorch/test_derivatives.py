"""Derivatives of every order and mode, of every operation: against central differences and each other."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch
from minitorch import (
    Context,
    Function,
    Scalar,
    ScalarFunction,
    Tensor,
    TensorBackend,
    from_numpy,
    grad,
    hessian,
    hvp,
    jvp,
    topological_sort,
    vjp,
)

from ..support.derivative_cases import CASES, ON_BACKENDS, Case, central, drawn, inner

on_cases = pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
sizes = st.fixed_dictionaries({name: st.integers(2, 3) for name in "nmk"})
seeds = st.integers(0, 1 << 32)
few = settings(max_examples=2)

#: Why a function has first derivatives only, or no derivatives.
FIRST_ONLY = {
    "All": "a step", "IsClose": "a step",
    "ModifiedScore": "a function of the user's", "_Reversible": "recomputes backwards",
    "Attn_Softmax": "published kernels", "Flash_Attn": "an alias",
    "Gathered": "communicates", "RingAttention": "communicates",
    "ToHeads": "communicates", "ToSequence": "communicates",
}  # fmt: skip
#: Functions that only other functions apply, or that only a GPU runs.
INNER = {
    "Function",
    "Several",
    "Convolution",
    "_Comparison",
    "_Linear",
    "Adjoint",
    "Fitted",
    "Again",
    "_Attention",
    "AttentionGradient",
    "AttentionTangent",
    "SecondAttention",
}
ON_GPUS = {"JoinedLinear", "Linear", "ResidualLayerNorm", "SeededDropout"}


def numbers(*shape: int, backend: TensorBackend = minitorch.SimpleBackend) -> Tensor:
    return from_numpy(np.random.default_rng(len(shape)).uniform(-1.0, 1.0, shape), backend)


def leaf(*shape: int) -> Tensor:
    x = numbers(*shape)
    x.requires_grad_(True)
    return x


# -- every operation -----------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "case"), [
    pytest.param(backend, CASES[name], id=f"{name}-{backend.kind.__name__}",
                 marks=[pytest.mark.emulated] * backend.cuda)
    for backend, names in ON_BACKENDS for name in names
])  # fmt: skip
@few
@given(sizes, seeds)
def test_derivatives_of_both_orders_are_those_of_central_differences(
    backend: TensorBackend, case: Case, sizes: dict[str, int], seed: int
) -> None:
    f, xs, ts = drawn(case, sizes, seed, backend)
    y, tangent = jvp(f, xs, ts)
    np.testing.assert_allclose(y.to_numpy(), f(*xs).to_numpy(), 1e-10, 1e-10)
    np.testing.assert_allclose(tangent.to_numpy(), central(f, xs, ts), 1e-6, 1e-6)
    u = numbers(*y.shape, backend=y.backend)
    _, gradients = vjp(f, xs, u)
    np.testing.assert_allclose(inner(gradients, ts), inner([u], [tangent]), 1e-9, 1e-9)

    def total(*own: Tensor) -> Tensor:
        return (f(*own) * u).sum()

    products = hvp(total, xs, ts)
    for i, (x, product) in enumerate(zip(xs, products, strict=True)):
        expected = central(lambda *own, i=i: vjp(total, own)[1][i], xs, ts)
        np.testing.assert_allclose(product.to_numpy(), expected, 1e-6, 1e-6, err_msg=str(x.shape))


@on_cases
@few
@given(sizes, seeds)
def test_reverse_over_reverse_is_forward_over_reverse(
    case: Case, sizes: dict[str, int], seed: int
) -> None:
    f, xs, ts = drawn(case, sizes, seed, minitorch.FastBackend)
    expected = hvp(lambda *own: f(*own).sum(), xs, ts)
    for x in xs:
        x.requires_grad_(True)
    f(*xs).sum().backward(create_graph=True)
    slopes = [x.grad for x in xs if x.grad is not None]
    slope = sum(((g * t).sum() for g, t in zip(slopes, ts, strict=True)), xs[0].sum() * 0.0)
    for found, own in zip(grad(slope, xs, allow_unused=True), expected, strict=True):
        given = np.zeros(own.shape) if found is None else found.to_numpy()
        np.testing.assert_allclose(given, own.to_numpy(), 1e-9, 1e-9)


@pytest.mark.parametrize(
    "name", ["exp", "cube", "sigmoid", "matrix cube", "softmax", "div", "attention"]
)
def test_third_derivatives_are_those_of_central_differences(name: str) -> None:
    f, xs, ts = drawn(CASES[name], {"n": 2, "m": 3, "k": 2}, 1, minitorch.FastBackend)

    def curvature(*own: Tensor) -> Tensor:
        moved = hvp(lambda *inner: f(*inner).sum(), own, ts)
        return sum(((h * t).sum() for h, t in zip(moved, ts, strict=True)), own[0].sum() * 0.0)

    np.testing.assert_allclose(
        jvp(curvature, xs, ts)[1].to_numpy(), central(curvature, xs, ts), 1e-6, 1e-6
    )


def kinds(of: type) -> Iterator[type]:
    """Yield every function of the library below a class."""
    for each in of.__subclasses__():
        if each.__module__.startswith("minitorch"):
            yield each
            yield from kinds(each)


def applied(*results: Any) -> set[str]:
    """Return the names of the functions that results were computed by."""
    found: list[Any] = [v for y in results for v in topological_sort(y) if not v.is_leaf()]
    return {v.history.last_fn.__name__ for v in found}


def test_no_function_is_left_out() -> None:
    met = set[str]()
    for case in CASES.values():
        f, xs, _ = drawn(case, {"n": 2, "m": 3, "k": 2}, 0, minitorch.FastBackend)
        for x in xs:
            x.requires_grad_(True)
        met |= applied(f(*xs))
    names = {kind.__name__ for kind in kinds(Function)}
    assert names - met - INNER - ON_GPUS - {*FIRST_ONLY} == set()


# -- what derivatives are of -----------------------------------------------------------------------


def test_a_tangent_of_one_level_is_no_tangent_of_another() -> None:
    def f(x: Any) -> Any:
        return x * jvp(lambda y: x + y, x, x / 3.0)[1]  # x · dy, and dy = x / 3 = 1

    assert jvp(f, Scalar(3.0), Scalar(1.0))[1].data == 2.0  # the slope of x² / 3
    assert jvp(f, from_numpy(np.array([3.0])), from_numpy(np.array([1.0])))[1].item() == 2.0

    def unmoved(x: Scalar) -> Scalar:
        return x * jvp(lambda y: x + y, Scalar(1.0), 1.0)[1]

    assert jvp(unmoved, Scalar(3.0), 1.0)[1].data == 1.0


@given(seeds)
@few
def test_a_hessian_is_symmetric_and_its_rows_are_products(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, x, y = (from_numpy(rng.normal(size=shape)) for shape in ((3, 2), (2, 3), (2,)))

    def f(x: Tensor, y: Tensor) -> Tensor:
        return ((x @ w).tanh() * y.exp()).sum()

    empty = from_numpy(np.zeros((0, 2)))
    assert hessian(lambda x: (x * x).sum(), empty).shape == (0, 2, 0, 2)
    blocks = hessian(f, (x, y))
    assert [[b.shape for b in row] for row in blocks] == [
        [(2, 3, 2, 3), (2, 3, 2)],
        [(2, 2, 3), (2, 2)],
    ]
    np.testing.assert_allclose(blocks[0][1].to_numpy(), blocks[1][0].to_numpy().transpose(1, 2, 0))
    of_x, of_y = hvp(f, (x, y), (x, y))
    for found, row in ((of_x, blocks[0]), (of_y, blocks[1])):
        sums = (
            np.tensordot(b.to_numpy(), t.to_numpy(), t.dims)
            for b, t in zip(row, (x, y), strict=True)
        )
        np.testing.assert_allclose(found.to_numpy(), sum(sums), 1e-9, 1e-9)


def of_every_order(loss: Callable[..., Tensor], xs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return products of first, second and third derivatives in one direction, by both modes."""

    def along(*own: Tensor) -> Tensor:
        return jvp(loss, own, xs)[1]

    def bend(*own: Tensor) -> Tensor:
        return jvp(along, own, xs)[1]

    return {
        "first": along(*xs),
        "forward over reverse": hvp(loss, xs, xs),
        "reverse over forward": vjp(along, xs)[1],
        "forward over forward": bend(*xs),
        "third, by reverse": vjp(bend, xs)[1],
        "third, by forward": jvp(lambda *own: hvp(loss, own, xs), xs, xs)[1],
    }


ATTENTION: list[dict[str, Any]] = [
    {"is_causal": True},
    {"softcap": 2.0, "return_lse": True},
    {"enable_gqa": True, "window_size": (2, 1)},
    {"dropout_p": 0.3, "seed": 3},
]


@given(seeds, st.sampled_from(ATTENTION))
@settings(max_examples=4)
def test_derivatives_of_attention_are_those_of_composed_attention(seed: int, options: Any) -> None:
    rng = np.random.default_rng(seed)
    shapes = (1, 4 if "enable_gqa" in options else 2, 4, 3), (1, 2, 5, 3), (1, 2, 5, 2)
    xs = tuple(from_numpy(rng.normal(size=shape), minitorch.FastBackend) for shape in shapes)

    def loss(attend: Callable[..., Any], *own: Tensor) -> Tensor:
        results = attend(*own, **options)
        results = results if isinstance(results, tuple) else (results,)
        return sum((y * y * y).sum() for y in results)  # type: ignore[return-value]

    expected = of_every_order(lambda *own: loss(minitorch.naive_attention, *own), xs)
    found = of_every_order(lambda *own: loss(Tensor.flash_attention, *own), xs)
    for name, wanted in expected.items():
        for a, b in zip(
            *(x if isinstance(x, tuple) else (x,) for x in (found[name], wanted)), strict=True
        ):
            np.testing.assert_allclose(a.to_numpy(), b.to_numpy(), 1e-8, 1e-8, err_msg=name)


def test_second_derivatives_of_attention_store_no_scores() -> None:
    x = from_numpy(np.random.default_rng(0).normal(size=(1, 2048, 4)), minitorch.FastBackend)

    def loss(x: Tensor) -> Tensor:
        out = x.flash_attention(x, x)
        return (out * out).sum()

    hvp(loss, x, x)  # compiles
    tracemalloc.start()
    hvp(loss, x, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2048 * 2048 * 8 / 4


def test_packed_sequences_have_second_derivatives_and_no_third() -> None:
    x, lengths = leaf(5, 1, 2), [0, 3, 5]

    def packed(x: Tensor) -> Tensor:
        out = x.flash_attention_varlen(x, x, lengths, lengths, is_causal=True)
        return (out * out).sum()

    def apart(x: Tensor) -> Tensor:
        parts = (x[a:b].permute(1, 0, 2) for a, b in ((0, 3), (3, 5)))
        outs = (minitorch.naive_attention(y, y, y, is_causal=True) for y in parts)
        return sum((y * y).sum() for y in outs)  # type: ignore[return-value]

    np.testing.assert_allclose(
        hvp(packed, x, x).to_numpy(), hvp(apart, x, x).to_numpy(), 1e-9, 1e-9
    )
    with pytest.raises(
        RuntimeError, match="packed sequences has first and second derivatives only"
    ):
        vjp(lambda x: hvp(packed, x, x).sum(), x)


def test_a_gradient_may_be_taken_of_inner_variables_and_through_them() -> None:
    x = leaf(3)
    y = x * 2.0
    of_x, of_y = grad((y * y).sum(), [x, y])
    np.testing.assert_allclose(of_x.to_numpy(), 8.0 * x.to_numpy())
    np.testing.assert_allclose(of_y.to_numpy(), 2.0 * y.to_numpy())
    assert x.grad is None


def test_a_function_of_the_user_s_is_differentiated_by_its_own_code() -> None:
    class Cube(Function):
        @staticmethod
        def forward(ctx: Context, a: Tensor) -> Tensor:
            ctx.save_for_backward(a)
            return a * a * a

        @staticmethod
        def backward(ctx: Context, grad_output: Tensor) -> Tensor:
            (a,) = ctx.saved_values
            return grad_output.f.mul_zip(grad_output, a * a * 3.0)

    x = numbers(4)
    found = hessian(lambda x: Cube.apply(x).sum(), x)
    np.testing.assert_allclose(found.to_numpy(), np.diag(6.0 * x.to_numpy()))


def test_results_are_constants_unless_something_else_requires_a_gradient() -> None:
    x, w = numbers(3), leaf(3)
    for f, is_constant in ((lambda x: x.exp(), True), (lambda x: (x * w).exp(), False)):
        found = *jvp(f, x, x), *vjp(f, x, x), hvp(lambda x, f=f: f(x).sum(), x, x)
        assert [t.is_constant() for t in found] == [is_constant] * 5
    assert x.is_constant() and w.grad is None


def test_parameters_are_trained_through_forward_mode() -> None:
    x, w = numbers(3), leaf(3)
    _, tangent = jvp(lambda x: (x * w).exp(), x, x * 0.0 + 1.0)  # w e^(x w)
    tangent.sum().backward()
    value = x.to_numpy() * w.to_numpy()
    assert w.grad is not None
    np.testing.assert_allclose(w.grad.to_numpy(), (1.0 + value) * np.exp(value))


def test_no_grad_does_not_change_a_derivative() -> None:
    x = numbers(3)
    expected = jvp(Tensor.exp, x, x)[1].to_numpy(), hessian(lambda x: x.exp().sum(), x).to_numpy()
    with minitorch.no_grad():
        found = jvp(Tensor.exp, x, x)[1].to_numpy(), hessian(lambda x: x.exp().sum(), x).to_numpy()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# -- scalars ---------------------------------------------------------------------------------------

SCALARS: list[Callable[..., Scalar]] = [
    lambda x, y: x * x * y + x, lambda x, y: x / y, lambda x, y: -x.exp() * y,
    lambda x, y: x.log() * y.log(),
    lambda x, y: (x * y).sigmoid(), lambda x, y: (x * x * y).relu(), lambda x, y: (x < y) * x * y,
    lambda x, y: ((x == y) + x) * y * y,
]  # fmt: skip


@pytest.mark.parametrize("f", SCALARS)
@given(st.floats(0.3, 2.0), st.floats(2.1, 3.0))
def test_scalars_have_derivatives_of_every_order(
    f: Callable[..., Scalar], x: float, y: float
) -> None:
    def directional(f: Callable[..., Scalar]) -> Callable[..., Scalar]:
        return lambda *own: jvp(f, own, (0.7, -0.4))[1]

    g = f
    for _ in range(3):
        above, below = (g(Scalar(x + 0.7 * e), Scalar(y - 0.4 * e)).data for e in (1e-5, -1e-5))
        g = directional(g)
        assert g(Scalar(x), Scalar(y)).data == pytest.approx((above - below) / 2e-5, 1e-5, 1e-5)
    (xx, xy), (yx, yy) = hessian(f, (Scalar(x), Scalar(y)))
    assert xy.data == pytest.approx(yx.data)
    assert 0.49 * xx.data - 0.56 * xy.data + 0.16 * yy.data == pytest.approx(
        directional(directional(f))(Scalar(x), Scalar(y)).data, abs=1e-9
    )


def test_no_function_of_scalars_is_left_out() -> None:
    results = [f(Scalar(1.0), Scalar(2.0)) for f in SCALARS]
    assert {kind.__name__ for kind in kinds(ScalarFunction)} - applied(*results) == {"Same"}


def test_backward_of_a_scalar_records_what_it_computes() -> None:
    x = Scalar(2.0)
    (x * x * x).backward(create_graph=True)
    slope: Any = x.derivative
    assert slope.data == 12.0 and grad(slope, x).data == 12.0


# -- what cannot be differentiated -----------------------------------------------------------------


class Squares(Function):
    """a², by NumPy."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return from_numpy(a.to_numpy() ** 2, a.backend)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        (a,) = ctx.saved_values
        return grad_output * a * 2.0


def test_a_function_that_reads_elements_has_first_derivatives_only() -> None:
    x = leaf(3)
    np.testing.assert_allclose(grad(Squares.apply(x).sum(), x).to_numpy(), 2.0 * x.to_numpy())
    for call in (
        lambda: grad(Squares.apply(x).sum(), x, create_graph=True),
        lambda: jvp(Squares.apply, x, x),
    ):
        with pytest.raises(RuntimeError, match=r"Squares has first derivatives only.*composed"):
            call()


def test_fused_functions_without_a_composed_form_have_first_derivatives_only() -> None:
    x = leaf(1, 3, 2)
    double = (lambda s, *_: s * 2.0, lambda s, *_: 2.0)
    reversible = minitorch.ReversibleSequence([(minitorch.Linear(2, 2), minitorch.Linear(2, 2))])
    for call, name in (
        (lambda: minitorch.naive_attention(x, x, x, score_mod=double), "ModifiedScore"),
        (lambda: reversible(x)[0], "_Reversible"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"{name} .*first derivatives only"):
            grad(call().sum(), x, create_graph=True)


def test_a_function_of_floats_has_first_derivatives_only() -> None:
    class Root(ScalarFunction):
        @staticmethod
        def forward(ctx: Context, a: float) -> float:
            ctx.save_for_backward(a)
            return float(np.sqrt(a))

        @staticmethod
        def backward(ctx: Context, d_output: float) -> float:
            (a,) = ctx.saved_values
            return float(0.5 / np.sqrt(a)) * d_output

    x = Scalar(4.0)
    assert grad(Root.apply(x), x).data == 0.25
    with pytest.raises(
        RuntimeError, match=r"Root is not differentiable twice.*minitorch\.operators"
    ):
        grad(Root.apply(x), x, create_graph=True)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_write_between_two_orders_is_noticed(create_graph: bool) -> None:
    x = leaf(3)
    slope = grad((x * x * x).sum(), x, create_graph=True)
    x[0] = 5.0
    with pytest.raises(RuntimeError, match="modified in place"):
        grad(slope.sum(), x, create_graph=create_graph)


def test_an_unused_input_has_no_gradient() -> None:
    x, unused = leaf(3), leaf(2)
    assert grad(x.sum(), [x, unused], allow_unused=True)[1] is None
    assert vjp(lambda a, b: a.sum(), (x, unused))[1][1].tolist() == [0.0, 0.0]
