"""Each approximate attention against its own formula in NumPy: values, gradients, limits, bad calls."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch import (
    CudaBackend,
    FastBackend,
    MultiHeadAttention,
    SimpleBackend,
    Tensor,
    TensorBackend,
    TransformerLayer,
    attention,
    from_numpy,
)
from minitorch.attention.approximate.performer import Performer

from ...support.attention import approximate_oracles as oracles
from ...support.examples import at_most
from ...support.tolerances import assert_close_arrays

Array = np.ndarray[Any, Any]
METHODS = ("linformer", "linear", "performer", "local", "reformer", "smyrf", "block_sparse")
CAUSAL = ("linear", "performer", "local", "reformer", "block_sparse")
on_methods = pytest.mark.parametrize("method", METHODS)


class Case:
    """A call of a method: arrays, options, and the same call of its oracle."""

    def __init__(self, method: str, shape: tuple[int, ...], options: dict[str, Any], seed: int = 0):
        *lead, seq_q, seq_k, dim, value_dim = shape
        random = np.random.default_rng(seed)
        self.method, self.options = method, options
        self.q = random.standard_normal((*lead, seq_q, dim))
        self.k = random.standard_normal((*lead, seq_k, dim))
        self.v = random.standard_normal((*lead, seq_k, value_dim))
        self.arrays = {"q": self.q, "v": self.v} if method == "reformer" else {
            "q": self.q, "k": self.k, "v": self.v
        }  # fmt: skip

    def expected(self, arrays: dict[str, Array]) -> Array:
        oracle: Callable[..., Array] = getattr(oracles, self.method)
        return oracle(arrays["q"], arrays.get("k", arrays["q"]), arrays["v"], **self.options)

    def run(
        self, backend: TensorBackend, dtype: Any = np.float64
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tensors = {
            name: from_numpy(array.astype(dtype), backend, requires_grad=True)
            for name, array in self.arrays.items()
        }
        options = {
            name: from_numpy(value.astype(dtype), backend) if name.startswith("project") else value
            for name, value in self.options.items()
        }
        q, v = tensors["q"], tensors["v"]
        out = getattr(attention, self.method)(q, tensors.get("k", q), v, **options)
        return out, tensors

    def check(self, backend: TensorBackend) -> None:
        """Compare values, and gradients with differences of the oracle along a random direction."""
        out, tensors = self.run(backend)
        assert_close_arrays(out, self.expected(self.arrays), np.float64, self.method, size=10.0)
        random = np.random.default_rng(1)
        weights = random.standard_normal(out.shape)
        out.backward(from_numpy(weights, backend))
        for name, t in tensors.items():
            direction = random.standard_normal(t.shape)
            low, middle, high = (
                (
                    weights
                    * self.expected({**self.arrays, name: self.arrays[name] + h * direction})
                ).sum()
                for h in (-1e-5, 0.0, 1e-5)
            )
            if abs(low - 2 * middle + high) > 1e-5:
                continue  # a hash or a cluster changes between the ends, where there is no derivative
            assert t.grad is not None
            found, slope = (t.grad.to_numpy() * direction).sum(), (high - low) / 2e-5
            assert found == pytest.approx(slope, rel=1e-4, abs=1e-4), f"gradient of {name}"


@st.composite
def cases(draw: st.DrawFn, method: str, most: int = 19) -> Case:
    """Draw a call whose sizes divide no chunk, or do."""
    if method == "block_sparse" and most > 5:
        most = 100  # several blocks of 16
    batch, heads, dim, value_dim = (draw(st.integers(1, 3)) for _ in range(4))
    seq_q = draw(st.integers(1, most))
    is_causal = method in CAUSAL and draw(st.booleans())
    same = is_causal or method == "reformer"
    seq_k = seq_q if same else draw(st.integers(1, most))
    seed = draw(st.integers(0, 1000))
    small = st.integers(1, 8)
    options: dict[str, Any] = {}
    if is_causal:
        options["is_causal"] = True
    if method != "linear" and draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.25, 1.5]))
    if draw(st.booleans()):
        mask = np.random.default_rng(seed).random((draw(st.sampled_from([1, batch])), seq_k)) < 0.7
        options["key_mask"] = mask
    if method == "linformer":
        lead = draw(st.sampled_from([(), (heads,)]))
        shape = (*lead, draw(small), seq_k + draw(st.integers(0, 2)))
        for name in ("project_k", "project_v"):
            options[name] = np.random.default_rng(len(name)).standard_normal(shape)
    elif method == "local":
        options["window"] = draw(st.integers(0, most))
    elif method == "block_sparse":
        patterns = "butterfly", "dilated", "strided"
        options |= {"block_size": 16, "pattern": draw(st.sampled_from(patterns))}
    elif method == "smyrf":
        options |= {"cluster": draw(small), "rounds": draw(st.integers(1, 3)), "seed": seed}
    elif method == "reformer":
        options |= {"chunk": draw(small), "rounds": draw(st.integers(1, 3)), "seed": seed}
        options["buckets"] = 2 * draw(st.integers(1, 3))
    else:
        options["chunk"] = draw(small)
    if method == "performer":
        options |= {"num_features": draw(st.integers(1, 9)), "seed": seed}
    return Case(method, (batch, heads, seq_q, seq_k, dim, value_dim), options, seed)


@on_methods
@at_most(25)
@given(data=st.data())
def test_a_method_computes_its_formula_and_its_gradients(method: str, data: st.DataObject) -> None:
    data.draw(cases(method)).check(FastBackend)


@on_methods
@pytest.mark.parametrize(
    "backend",
    [SimpleBackend, pytest.param(CudaBackend, marks=pytest.mark.emulated)],
    ids=["simple", "cuda"],
)
@at_most(2)
@given(data=st.data())
def test_other_backends_agree(method: str, backend: TensorBackend, data: st.DataObject) -> None:
    data.draw(cases(method, most=5)).check(backend)


#: Options of each method; the reformer and Smyrf hash all 13 positions of a sequence into one chunk.
PLAIN: dict[str, dict[str, Any]] = {
    "linformer": {"project_k": np.eye(13), "project_v": np.eye(13)},
    "linear": {},
    "performer": {"num_features": 16},
    "local": {"window": 13},
    "reformer": {"chunk": 13, "rounds": 2, "seed": 3},
    "smyrf": {"cluster": 13, "rounds": 3, "seed": 3},
    "block_sparse": {"block_size": 16},
}


@on_methods
@pytest.mark.parametrize("dtype", [np.float16, minitorch.bfloat16, np.float32])
def test_results_keep_the_dtype(method: str, dtype: Any) -> None:
    case = Case(method, (2, 2, 13, 13, 4, 4), PLAIN[method])
    out, tensors = case.run(FastBackend, dtype)
    out.backward(from_numpy(np.ones(out.shape, dtype), FastBackend))
    assert out.dtype == dtype
    for name, t in tensors.items():
        assert t.grad is not None and t.grad.dtype == dtype, name
        assert np.isfinite(t.grad.to_numpy().astype(np.float32)).all(), name
    if dtype == np.float32 and method != "reformer":
        assert_close_arrays(out, case.expected(case.arrays), dtype, method, size=10.0)


# -- the approximation made exact ----------------------------------------------------------------


def exact(case: Case, visible: Any = None) -> Array:
    scale = case.options.get("scale")
    return oracles.exact(
        case.q, case.k, case.v, visible=1.0 if visible is None else visible, scale=scale
    )


@pytest.mark.parametrize("method", ["linformer", "local", "smyrf", "reformer", "causal reformer"])
def test_an_approximation_that_leaves_nothing_out_is_exact(method: str) -> None:
    method, is_causal = method.removeprefix("causal "), "causal" in method
    options = {**PLAIN[method], **({"is_causal": True} if is_causal else {})}
    case, visible = Case(method, (2, 2, 13, 13, 4, 3), options), None
    if method == "reformer":  # a query attends to others
        case.k = case.q / np.linalg.norm(case.q, axis=-1, keepdims=True)
        visible = np.tri(13, k=-1) if is_causal else 1.0 - np.eye(13)
        visible[0, 0] = is_causal  # it sees no other
    assert_close_arrays(case.run(FastBackend)[0], exact(case, visible), np.float64)


def test_performers_error_falls_with_the_root_of_its_features() -> None:
    errors = []
    for count in (64, 4096):
        squares = []
        for seed in range(4):
            options = {"num_features": count, "seed": seed, "scale": 0.1}
            case = Case("performer", (1, 2, 32, 32, 8, 4), options)
            squares.append((case.run(FastBackend)[0].to_numpy() - exact(case)) ** 2)
        errors.append(np.sqrt(np.mean(squares)))
    # 64 times as many features: an eighth of the error.
    assert 5.0 < errors[0] / errors[1] < 13.0, errors


@given(st.sampled_from([5.0, 30.0, 70.0]), st.sampled_from([1, 8, 64]), st.integers(0, 99))
def test_causal_performer_averages_what_it_sees_however_large_the_scores(
    size: float, chunk: int, seed: int
) -> None:
    case = Case("performer", (1, 2, 24, 24, 8, 3), {"is_causal": True, "chunk": chunk}, seed)
    case.q *= size
    case.k *= size
    for dtype in (np.float32, np.float64):
        out, operands = case.run(FastBackend, dtype)
        found, v = out.to_numpy(), case.v
        slack = 1e-4 * np.abs(v).max()
        assert (found <= np.maximum.accumulate(v, axis=-2) + slack).all()
        assert (found >= np.minimum.accumulate(v, axis=-2) - slack).all()
        out.sum().backward()
        for name, t in operands.items():
            assert t.grad is not None and np.isfinite(t.grad.to_numpy()).all(), name


@on_methods
def test_memory_stays_far_below_a_matrix_of_scores(method: str) -> None:
    seq = 16384
    options = {"linformer": {"project_k": np.ones((8, seq))}, "performer": {"num_features": 16}}
    case = Case(method, (1, 1, seq, seq, 8, 8), options.get(method, {}))
    case.run(FastBackend)[0].sum().backward()  # compiles; under tracemalloc that takes a minute
    tracemalloc.start()
    case.run(FastBackend)[0].sum().backward()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < seq * seq, f"{method} takes {peak:,} bytes"  # an eighth of a head's scores


# -- as a layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", (*METHODS, "flash", "naive"))
def test_a_layer_hides_masked_positions(method: str) -> None:
    minitorch.manual_seed(0)
    options = {} if method in ("flash", "naive") else PLAIN[method]
    if method == "linformer":
        options = {"length": 16, "count": 4}
    layer = TransformerLayer(
        8, 2, causal=False, p_dropout=0.0, backend=FastBackend, attention=method,
        attention_options=options or None,
    )  # fmt: skip
    array = np.random.default_rng(0).standard_normal((2, 13, 8))
    other, shown = array.copy(), np.arange(13) < 9
    other[:, 9:] = 5.0
    outs = [layer(from_numpy(a, FastBackend), key_mask=shown[None]) for a in (array, other)]
    assert_close_arrays(outs[0].to_numpy()[:, :9], outs[1].to_numpy()[:, :9], np.float64)


def test_reformer_has_no_keys_of_its_own() -> None:
    layer = MultiHeadAttention(8, 2, attention="reformer")
    assert not any(name.startswith("k_projection") for name, _ in layer.named_parameters())


def test_performer_draws_new_features_in_training() -> None:
    method = Performer(num_features=8, redraw_every=2)
    q, k, v = (minitorch.rand((1, 1, 5, 4), FastBackend) for _ in range(3))
    outs = [method(q, k, v).to_numpy() for _ in range(3)]
    assert np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[1], outs[2])
    method.eval()
    assert np.array_equal(method(q, k, v).to_numpy(), method(q, k, v).to_numpy())


@pytest.mark.parametrize("method", ["reformer", "smyrf"])
def test_manual_seed_decides_the_hashes(method: str) -> None:
    q, v = minitorch.rand((1, 1, 32, 4), FastBackend), minitorch.rand((1, 1, 32, 4), FastBackend)
    function = getattr(attention, method)
    outs = []
    for seed in (0, 0, 1):
        minitorch.manual_seed(seed)
        size = {"chunk" if method == "reformer" else "cluster": 4}
        outs.append(function(q, q, v, **size).to_numpy())
    assert np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[0], outs[2])
