"""Products on tensor cores: what the kernels' own source computes, who works on what, layers of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

import minitorch
from kernels.cuda.device.warpgroups import block_bytes
from kernels.cuda.matmul import dispatch
from kernels.cuda.matmul.dispatch import Epilogue
from kernels.cuda.matmul.layout import (
    Order,
    ProductForm,
    ProductLayout,
    WarpLayout,
    place_of,
    shared_tiles,
)
from kernels.cuda.runtime.arrays import empty_device, to_device, to_host
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, HALF_DTYPES
from kernels.runtime.launch_notes import launches_noted
from kernels.runtime.targets import compute_capability
from minitorch import CudaBackend, TensorBackend, from_numpy
from minitorch.accelerated.linear import Linear, fuses_linear

from ...minitorch.functions.test_fused import gelu_of
from ...support.device.emulated_gpu import emulated_gpu, emulated_only
from ...support.tensor_cores.products import (
    CALLS,
    KINDS,
    TINY,
    Product,
    operands,
    run,
    steps_of,
)
from ...support.tolerances import assert_close_arrays

#: Shared memory that a block can have, in bytes, by compute capability.
MOST_SHARED = {(9, 0): 227 * 1024, (8, 6): 99 * 1024}
plain = place_of.py_func  # type: ignore[attr-defined]


@given(
    integers(1, 9), integers(1, 9), integers(1, 5), integers(1, 4), integers(1, 5)
)  # fmt: skip
def test_every_tile_of_every_matrix_is_one_item_and_bands_come_one_after_the_other(
    row_tiles: int, col_tiles: int, matrices: int, band: int, _: int
) -> None:
    order = Order(row_tiles, col_tiles, min(band, row_tiles), matrices)
    items = [tuple(map(int, plain(np.int64(item), order))) for item in range(order.items)]
    assert len(set(items)) == order.items == row_tiles * col_tiles * matrices
    assert all(row < row_tiles and col < col_tiles for row, col, _ in items)
    bands = [(matrix, row // order.band) for row, _, matrix in items]
    assert bands == sorted(bands)


@given(
    integers(1, 3), integers(1, 20000), integers(1, 60000), integers(1, 2000),
    sampled_from([(True, 1), (True, 3), (False, 1)]), sampled_from([True, False]),
)  # fmt: skip
def test_no_part_of_a_sum_is_empty_and_tiles_fit_in_shared_memory(
    matrices: int, rows: int, cols: int, steps: int, device: tuple[bool, int], is_whole: bool
) -> None:
    is_hopper, planes = device
    with patch.object(dispatch, "multiprocessors", lambda: 132):
        choose = dispatch._layout.__wrapped__
        layout, parts, whole = choose(matrices, rows, cols, steps, is_hopper, planes, is_whole)
    assert 1 <= parts <= (1 if is_whole else min(steps, 128))
    assert (parts - 1) * -(-steps // parts) < steps
    assert whole is None or (parts == 1 and whole % 132 == 0)
    if isinstance(layout, WarpLayout):
        assert not is_hopper and layout.shared_bytes <= MOST_SHARED[8, 6]
        return
    for out in ("bfloat16", "float32") if planes == 1 else ("float32",):
        form = ProductForm("bfloat16", out, planes=planes)
        assert block_bytes(shared_tiles(layout, form)) <= MOST_SHARED[9, 0]


@emulated_only
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("cc", [(9, 0), (8, 0)], ids=["wgmma", "mma"])
def test_the_kernels_own_source_multiplies(cc: tuple[int, int], name: str) -> None:
    call = TINY[name]
    if call.kind == "split" and cc < (9, 0):
        pytest.skip("numbers of three planes are Hopper's")
    with emulated_gpu(cc):
        error = run(call, np.random.default_rng(0))
    assert error <= 1, f"{error:.3g} of what is allowed"


@emulated_only
@pytest.mark.parametrize(
    ("blocks", "cols", "whole"), [(2, 160, 2), (4, 150, 0), (5, 64, 0), (3, 320, 3), (3, 320, 0)]
)
@pytest.mark.parametrize("kind", ["bfloat16", "tf32"])
def test_blocks_share_the_sums_of_the_last_tiles(
    kind: str, blocks: int, cols: int, whole: int
) -> None:
    call, layout = Product(kind, (40, cols, 456), a_turned=True), ProductLayout(1, 64, 2, 1)
    with (
        emulated_gpu(blocks=blocks),
        patch.object(dispatch, "_layout", lambda *_: (layout, 1, whole)),
    ):
        errors = [run(call, np.random.default_rng(0)) for _ in range(2)]
    assert max(errors) <= 1, f"{max(errors):.3g} of what is allowed"


@emulated_only
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "tf32"])
@pytest.mark.parametrize("cc", [(9, 0), (8, 0)], ids=["wgmma", "mma"])
def test_bias_and_gelu_are_applied_before_a_number_is_stored(
    cc: tuple[int, int], kind: str
) -> None:
    dtype, unit = KINDS[kind]
    rng = np.random.default_rng(0)
    a, b, bias = (
        rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        for shape in ((40, 24), (24, 72), (72,))
    )
    out, before = (empty_device((40 * 72,), dtype) for _ in range(2))
    with emulated_gpu(cc):
        left, right, shift = (to_device(x.reshape(-1)) for x in (a, b, bias))
        dispatch.multiply(
            out, (0, 0, 72, 1), left, (0, 0, 24, 1), right, (0, 0, 72, 1),
            (1, 1, 40, 72, 24), kind, *Epilogue(shift, True, before),
        )  # fmt: skip
    expected = a.astype(np.float64) @ b.astype(np.float64) + bias.astype(np.float64)
    allowed = 8 * unit
    assert_near(to_host(before).reshape(40, 72), expected, allowed)
    assert_near(to_host(out).reshape(40, 72), gelu_of(expected), allowed)


def assert_near(found: Any, expected: Any, allowed: float) -> None:
    """Assert that numbers are off by no more than a part of 1 and of themselves."""
    error = np.abs(found.astype(np.float64) - expected) / (1.0 + np.abs(expected))
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert error[worst] <= allowed, f"{found[worst]} at {worst} should be {expected[worst]}"


@emulated_only
def test_infinities_and_the_largest_numbers_are_multiplied_as_float32_does() -> None:
    rng = np.random.default_rng(0)
    call = Product("split", (33, 40, 36))
    (a, _), (b, _) = operands(call, rng)
    largest = np.float32(np.finfo(np.float32).max)
    for special in (largest, -largest, np.float32(1e-38), np.float32(np.inf), np.float32(np.nan)):
        a[0, 0, 3, 5] = special
        b[0, 0, 5, :] = np.float32(0.25)
        with np.errstate(all="ignore"):
            expected = a.astype(np.float64) @ b.astype(np.float64)
        out = empty_device((33 * 40,), FLOAT32)
        with emulated_gpu((9, 0)):
            left, right = (to_device(x.reshape(-1)) for x in (a, b))
            dispatch.multiply(
                out, (0, 0, 40, 1), left, steps_of(a), right, steps_of(b),
                (1, 1, *call.sizes), "split",
            )  # fmt: skip
        found = to_host(out).reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# -- layers -----------------------------------------------------------------------------------------


def compare_layers(
    backend: TensorBackend, dtype: Any, has_gelu: bool, has_bias: bool, allowed: float
) -> None:
    """Assert that a layer and its gradients agree with those of the composed form in float64."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in ((21, 40), (40, 24), (24,))]
    slope = rng.standard_normal((21, 24)).astype(dtype)
    results = []
    for own, kind, function in (
        (backend, dtype, lambda *t: Linear.apply(*t, has_gelu)),
        (
            minitorch.FastBackend,
            np.float64,
            partial(minitorch.plain()(minitorch.linear), has_gelu=has_gelu),
        ),
    ):
        tensors: list[Any] = [from_numpy(x.astype(kind), own) for x in arrays]
        for t in tensors:
            t.requires_grad_(True)
        x, w, bias = tensors
        out = function(x, w, bias if has_bias else None)
        (out * from_numpy(slope.astype(kind), own)).sum().backward()
        grads = [t.grad.to_numpy() for t in tensors[: 2 + has_bias]]
        results.append([out.to_numpy(), *grads])
    for found, expected in zip(*results, strict=True):
        size = np.abs(expected).max()
        assert_near(found.astype(np.float64) / size, expected / size, allowed)


@emulated_only
@pytest.mark.parametrize("has_gelu", [True, False])
@pytest.mark.parametrize("cc", [(9, 0), (8, 0)], ids=["wgmma", "mma"])
def test_the_backends_linear_layer_has_the_gradients_of_its_composed_form(
    cc: tuple[int, int], has_gelu: bool
) -> None:
    with emulated_gpu(cc):
        assert fuses_linear(BFLOAT16, (21, 24, 40))
        assert not fuses_linear(BFLOAT16, (21, 23, 40))
        compare_layers(CudaBackend, BFLOAT16, has_gelu, True, 6 * KINDS["bfloat16"][1])


def compare_projections(
    dtype: Any, sizes: tuple[int, int, int], has_bias: bool, used: str, allowed: float,
    head_dim: int | None = None,
) -> None:  # fmt: skip
    """Assert that q, k and v of a layer, and all gradients, are those of three layers in float64.

    ``sizes`` are batch, seq and n_embd, and ``used`` names the results that a loss depends on.
    """
    rng, (*lead, width) = np.random.default_rng(0), sizes
    layer = minitorch.MultiHeadAttention(
        width, 2, bias=has_bias, head_dim=head_dim, backend=CudaBackend, dtype=dtype
    )
    x: Any = from_numpy(rng.standard_normal(sizes).astype(dtype), CudaBackend, requires_grad=True)
    found, expected, dx, loss = [], [], np.zeros((math.prod(lead), width)), x.sum() * 0.0
    rows = x.to_numpy().astype(np.float64).reshape(-1, width)
    for name, out in zip("qkv", layer.projected(x), strict=True):
        projection: Any = getattr(layer, f"{name}_projection")
        weights, *bias = (p.value.to_numpy().astype(np.float64) for p in projection.parameters())
        found.append(out.permute(0, 2, 1, 3).contiguous().to_numpy().reshape(len(rows), -1))
        expected.append(sum(bias, rows @ weights))
        if name in used:
            slope = rng.standard_normal(out.shape).astype(dtype)
            loss = loss + (out * from_numpy(slope, CudaBackend)).sum()
            grad = slope.astype(np.float64).transpose(0, 2, 1, 3).reshape(len(rows), -1)
            expected += [rows.T @ grad, *(grad.sum(0) for _ in bias)]
            found += [p.value for p in projection.parameters()]
            dx += grad @ weights.T
    loss.backward()
    for own, right in zip([*found, x], [*expected, dx], strict=True):
        size = np.abs(right).max()
        array = own if isinstance(own, np.ndarray) else own.grad.to_numpy()
        assert_near(array.astype(np.float64).reshape(right.shape) / size, right / size, allowed)


@emulated_only
@pytest.mark.parametrize(
    ("cc", "width", "has_bias", "used"),
    [
        ((9, 0), 48, True, "qkv"), ((9, 0), 48, False, "qv"), ((8, 0), 48, True, "qkv"),
        ((9, 0), 12, True, "qkv"),  # whose gradient cannot be stored by the kernel
    ],
)  # fmt: skip
def test_q_k_and_v_are_one_product_on_hopper_with_the_gradients_of_three(
    cc: tuple[int, int], width: int, has_bias: bool, used: str
) -> None:
    head_dim, allowed = 8 if width == 12 else None, 8 * KINDS["bfloat16"][1]
    with emulated_gpu(cc), launches_noted() as launches:
        compare_projections(BFLOAT16, (3, 7, width), has_bias, used, allowed, head_dim)
    products = [one for one in launches if "product" in getattr(one, "kernel", "")]
    assert len(products) == (3 if cc == (9, 0) and width == 48 else 9)


# -- precision --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _float32_products() -> Iterator[None]:
    yield
    minitorch.set_matmul_precision("float32")


def test_precision_is_set_for_a_block_and_then_what_it_was() -> None:
    assert minitorch.get_matmul_precision() == "float32"
    with minitorch.matmul_precision("tf32"):
        assert minitorch.get_matmul_precision() == "tf32"
        with pytest.raises(ValueError, match="must be one of 'float32', 'tf32'"):
            minitorch.set_matmul_precision("tf33")
        minitorch.set_matmul_precision("bfloat16")
    assert minitorch.get_matmul_precision() == "float32"


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0)])
def test_what_multiplies_follows_from_device_dtype_and_precision(
    cc: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "compute_capability", lambda: cc)
    monkeypatch.setattr(dispatch, "why_no_device", lambda least: None if cc >= least else "too old")
    has_tensor_cores, large = cc >= (8, 0), (1, 1, 2048, 2048, 2048)
    kind_of = dispatch.kind_of
    for shape in (large, (1, 1, 5, 5, 5)):
        for dtype in HALF_DTYPES:
            assert kind_of(dtype, "float32", shape) == (str(dtype) if has_tensor_cores else None)
        for precision in ("tf32", "bfloat16", "float16"):
            assert kind_of(FLOAT32, precision, shape) == (precision if has_tensor_cores else None)
        assert kind_of(np.dtype(np.float64), "tf32", shape) is None
    assert kind_of(FLOAT32, "float32", large) == ("split" if cc >= (9, 0) else None)
    assert kind_of(FLOAT32, "float32", (1, 1, 64, 2048, 2048)) is None
    assert kind_of(FLOAT16, "float32", (1, 1, 2, 2, 0)) is None


# -- on a GPU ---------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("name", CALLS)
def test_a_gpu_multiplies(name: str) -> None:
    if CALLS[name].kind == "split" and compute_capability() < (9, 0):
        pytest.skip("numbers of three planes are Hopper's")
    error = run(CALLS[name], np.random.default_rng(0))
    assert error <= 1, f"{error:.3g} of what is allowed"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("has_gelu", [True, False])
def test_a_gpus_linear_layer_has_the_gradients_of_its_composed_form(
    dtype: Any, has_gelu: bool
) -> None:
    compare_layers(CudaBackend, dtype, has_gelu, True, 6 * KINDS[str(dtype)][1])


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(3, 111, 136), (2, 1024, 768)], ids=str)
def test_a_gpus_q_k_and_v_have_the_gradients_of_three_layers(sizes: tuple[int, int, int]) -> None:
    for dtype in (BFLOAT16, FLOAT16):
        for has_bias, used in ((True, "qkv"), (False, "qk")):
            compare_projections(dtype, sizes, has_bias, used, 8 * KINDS[str(dtype)][1])


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["tf32", "bfloat16", "float16"])
def test_a_gpu_rounds_only_what_it_may(precision: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    tensors = [from_numpy(x, CudaBackend) for x in (a, b)]
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert_close_arrays((tensors[0] @ tensors[1]).to_numpy(), exact, np.float32, size=64.0)
    with minitorch.matmul_precision(precision):
        assert_near((tensors[0] @ tensors[1]).to_numpy(), exact, 16 * KINDS[precision][1])


@pytest.mark.cuda
@pytest.mark.parametrize("special", [0.0, np.inf, np.nan, 3e38])
def test_a_gpus_large_products_of_float32_are_exact_and_know_infinities(special: float) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((1024, 1024)).astype(np.float32) for _ in range(2))
    a[3, 5], b[5] = special, np.abs(b[5]) / 8
    tensors = [from_numpy(x, CudaBackend) for x in (a, b.T.copy())]
    with np.errstate(all="ignore"):
        exact = a.astype(np.float64) @ b.astype(np.float64)
        found = (tensors[0] @ tensors[1].permute(1, 0)).to_numpy()
    # Of the sum of absolute values, which float32 is held to: an infinity ends on CUDA cores.
    sizes = np.abs(np.where(np.isfinite(a), a, 0.0)).astype(np.float64) @ np.abs(b)
    np.testing.assert_allclose(found / sizes, exact / sizes, rtol=1e-6, atol=1e-6)
