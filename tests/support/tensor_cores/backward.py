"""Calls of the backward kernels of attention on tensor cores, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.attention.flash2_mma.dkdv import dkdv_kernel
from kernels.cuda.attention.flash2_mma.dkdv_wide_heads import roles_kernel
from kernels.cuda.attention.flash2_mma.dq import dq_kernel
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, dq_end_kernel, dq_sums, slots_of
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout, MmaLayout, MmaRoleLayout
from kernels.cuda.device.memory import fill
from kernels.cuda.ptx.emulated.numbers import from_bits, to_bits
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.cuda.runtime.kernel import Kernel
from kernels.reference.scores import kept

from .attention import LARGE, OPTIONS, TINY, Call, operands


class Gradients(NamedTuple):
    """One backward call.

    Attributes:
        call: The forward call; its layout is that of the kernel by query rows.
        layout: Of the kernel by keys.
        parts: Blocks that share the columns of one key tile.
        is_wide: Four sums of dQ are added at a time.
    """

    call: Call
    layout: MmaKeyLayout
    parts: int = 1
    is_wide: bool = True

    @property
    def widths(self) -> tuple[int, int]:
        """What kernels are compiled for."""
        roles = isinstance(self.layout, MmaRoleLayout)
        step = 256 * self.layout.warps // self.layout.block_q if roles else 16 * self.parts
        sizes = [max(self.call.sizes[2:])] * 2 if roles else self.call.sizes[2:]
        head, value = (step * ceil_div(dim, step) for dim in sizes)
        return head, value

    @property
    def kind(self) -> tuple[Any, ...]:
        """Widths, dtype, and whether rows are whole pieces."""
        return (*self.widths, self.call.dtype, all(dim % 8 == 0 for dim in self.call.sizes[2:]))

    @property
    def sums(self) -> DqSums:
        """How those of dQ lie."""
        return dq_sums(self.layout, self.widths[0] // self.parts, self.is_wide)


def backward_launches(
    case: Gradients, given: list[Any], atomics: bool, place: Any, launch: Any = None
) -> dict[str, Callable[[], Any]]:
    """Return the launches of a call by name, in their order; each returns what it has written.

    Args:
        case: The call.
        given: dout, q, k, v, lse, its rest and delta, where kernels run.
        atomics: One kernel, or one by rows and one by keys.
        place: Brings an array to where kernels run.
        launch: ``(kernel, grid, *arguments)``; that of a GPU when None.
    """
    call, layout, run = case.call, case.layout, launch or _on_device
    seq_q, seq_k, head_dim, value_dim = call.sizes
    own = {n: place(x) if isinstance(x, np.ndarray) else x for n, x in (call.options or {}).items()}
    extras = call._replace(options=own).extras
    heads = call.heads
    shapes = (seq_q, head_dim), (seq_k, head_dim), (seq_k, value_dim)
    dq, dk, dv = (place(np.full((1, heads, *shape), 0xFFFF, np.uint16)) for shape in shapes)
    scale, grid = call.scale, ceil_div(seq_k, layout.block_k) * case.parts
    if not atomics:
        by_rows = dq_kernel(call.layout, *case.kind, call.features)
        by_keys = _by_keys(case, None)

        def fill_dq() -> Any:
            run(by_rows, call.grid, *given, dq, scale, extras)
            return {"dq": dq}

        def fill_dk_dv() -> Any:
            run(by_keys, (grid, heads), *given, given[-1], dk, dv, scale, extras)
            return {"dk": dk, "dv": dv}

        return {"by rows": fill_dq, "by keys": fill_dk_dv}
    width, _, *kind = case.kind
    all_of = _by_keys(case, case.sums)
    end = dq_end_kernel(layout, width, *kind, case.sums, call.features, case.parts)
    slots = slots_of(seq_q, layout.block_q, 1)
    sums = place(np.zeros((heads, slots, layout.block_q * width), np.float32))

    def add() -> Any:
        sums.fill(0.0) if launch else fill(sums, 0.0)
        run(all_of, (grid, heads), *given, sums, dk, dv, scale, extras)
        q_tiles = ceil_div(seq_q, layout.block_q)
        run(end, (q_tiles, heads), sums, given[1], given[2], dq, scale, extras)
        return {"dq": dq, "dk": dk, "dv": dv}

    return {"by atomics": add}


def _by_keys(case: Gradients, sums: DqSums | None) -> Kernel:
    if isinstance(case.layout, MmaRoleLayout):
        return roles_kernel(case.layout, *case.kind[1:], sums, case.call.features)
    return dkdv_kernel(case.layout, *case.kind, sums, case.call.features, case.parts)


def _on_device(kernel: Any, grid: tuple[int, int], *args: Any) -> None:
    kernel[grid, kernel.threads](*args)


def gradients(
    case: Gradients, arrays: list[Any], atomics: bool, launch: Any = None, place: Any = to_device
) -> list[Any]:
    """Launch the kernels; return dq, dk and dv where they were placed.

    Args:
        case: The call.
        arrays: dout, q, k, v, lse, its rest and delta, on the host.
        atomics: As for :func:`backward_launches`, and the others too.
        launch: Likewise.
        place: Likewise.
    """
    given = [place(array) for array in arrays]
    found: dict[str, Any] = {}
    for run in backward_launches(case, given, atomics, place, launch).values():
        found |= run()
    return [found[name] for name in ("dq", "dk", "dv")]


def run_on_gpu(case: Gradients, atomics: bool, rng: np.random.Generator) -> None:
    """Run a call on a GPU and assert that it is right."""
    arrays = backward_operands(case, rng)
    check(case, arrays, [to_host(x) for x in gradients(case, arrays, atomics)], str(case))


def check(case: Gradients, arrays: list[Any], results: list[Any], label: str) -> None:
    """Assert that dq, dk and dv are right, to a unit of what they are sums of."""
    call = case.call
    dout, q, k, v = (from_bits(x, call.dtype).astype(np.float64) for x in arrays[:4])
    probs, slope, keep, delta = _probabilities(call, q, k, v, dout)
    dropped = probs * keep
    dp = dout @ v.swapaxes(-1, -2)
    ds = probs * (dp * keep - delta[..., None]) * slope
    turned = [x.swapaxes(-1, -2) for x in (dropped, ds)]
    wanted = {
        "dq": (call.scale * ds, k),
        "dk": (call.scale * turned[1], q),
        "dv": (turned[0], dout),
    }
    unit = 2.0**-10 if call.dtype == "float16" else 2.0**-7
    # dS is a difference: where it cancels, what float32 rounds of its two terms remains.  One is a sum, of
    # which each step is rounded: it may be small where its parts are not.
    parts = abs(dout) @ abs(v).swapaxes(-1, -2) * keep
    terms = probs * (parts + abs(delta[..., None]))
    # Float16 has nothing between 0 and 2**-24: of dS, and of a result, half of that may be lost.
    step = 2.0**-25 / unit if call.dtype == "float16" else 0.0
    lost = abs(call.scale) * (2.0**-23 / unit * terms + step * (probs > 0))
    roundings = {"dq": lost, "dk": lost.swapaxes(-1, -2), "dv": 0.0}
    for (name, (left, right)), bits in zip(wanted.items(), results, strict=True):
        expected = left @ right
        bound = (abs(left) + roundings[name]) @ abs(right) + step + 1e-5
        error = abs(from_bits(bits, call.dtype) - expected) / (unit * bound)
        worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
        assert error[worst] <= 1, f"{name} of {label} is off at {worst} by {error[worst]} units"


def _probabilities(call: Call, q: Any, k: Any, v: Any, dout: Any) -> Any:
    """Return P, the slope of the softcap, what dropout multiplies by, and delta."""
    given, features = call.extras, call.features
    scores = call.scale * q @ k.swapaxes(-1, -2)
    slope: Any = 1.0
    if features.softcap:
        bent = np.tanh(scores / given.softcap)
        scores, slope = given.softcap * bent, 1 - bent * bent
    head, row, col = np.indices(scores.shape[-3:])
    seen = (row + given.lower <= col) & (col <= row + given.upper)
    if features.mask:
        seen = seen & given.mask
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    probs = weights / np.where(total == 0, 1, total)
    keep: Any = 1.0
    if features.dropout:
        rate = given.threshold / 2**16
        keep = kept(given.seed, rate, head, row, col) * float(given.keep_scale)
    out = (probs * keep) @ v
    return probs, slope, keep, (dout * out).sum(axis=-1)


def backward_operands(case: Gradients, rng: np.random.Generator) -> list[Any]:
    """Return dout, q, k, v, lse, its rest and delta."""
    call = case.call
    q, k, v, out, *_ = operands(call, rng)
    dout = to_bits(rng.standard_normal(out.shape), call.dtype)
    wide = [from_bits(x, call.dtype).astype(np.float64) for x in (q, k, v, dout)]
    *_, delta = _probabilities(call, *wide)
    lse = _lse(call, wide[0], wide[1])
    rest = np.where(np.isfinite(lse), lse - lse.astype(np.float32), 0.0)
    return [dout, q, k, v, *(x.astype(np.float32) for x in (lse, rest, delta))]


def _lse(call: Call, q: Any, k: Any) -> Any:
    given, features = call.extras, call.features
    scores = call.scale * q @ k.swapaxes(-1, -2)
    if features.softcap:
        scores = given.softcap * np.tanh(scores / given.softcap)
    _, row, col = np.indices(scores.shape[-3:])
    seen = (row + given.lower <= col) & (col <= row + given.upper)
    if features.mask:
        seen = seen & given.mask
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(axis=-1)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(scores - shift[..., None]).sum(axis=-1)) + shift


#: Layouts by keys of the emulated GPU's calls.
_TINY_LAYOUTS = {
    "whole tiles": (MmaKeyLayout(16, 16, 1, 16), 1),
    "odd lengths, causal": (MmaKeyLayout(32, 32, 1, 16), 1),
    "a window, two warps": (MmaKeyLayout(32, 32, 2, 32), 1),
    "no whole pieces": (MmaKeyLayout(16, 16, 1, 16), 1),
    "padded widths": (MmaKeyLayout(16, 16, 1, 16), 2),
    "rows that see nothing": (MmaKeyLayout(16, 16, 1, 16), 1),
    "keys that no row sees": (MmaKeyLayout(16, 16, 1, 16), 1),
}
GRADIENTS = {
    name: Gradients(TINY[name], layout, parts, is_wide=name != "padded widths")
    for name, (layout, parts) in _TINY_LAYOUTS.items()
}
GRADIENTS |= {
    f"{name}, in two halves": Gradients(TINY[name], layout)
    for name, layout in (
        ("whole tiles", MmaRoleLayout(16, 16, 2, 16)),
        ("a window, two warps", MmaRoleLayout(32, 16, 4, 16)),
        ("odd lengths, causal", MmaRoleLayout(16, 32, 4, 16)),
        ("no whole pieces", MmaRoleLayout(32, 32, 4, 16)),
        ("rows that see nothing", MmaRoleLayout(16, 16, 2, 16)),
        ("keys that no row sees", MmaRoleLayout(16, 16, 2, 16)),
    )
}
OF_OPTIONS = {name: Gradients(call, MmaKeyLayout(32, 32, 2, 16)) for name, call in OPTIONS.items()}
_LARGE_KEYS = {64: MmaKeyLayout(64, 128, 4, 32, resident=2), 128: MmaKeyLayout(64, 128, 8, 64)}


def _by_rows(call: Call) -> Call:
    """Return a call with the layout by rows of wide heads."""
    return call._replace(layout=MmaLayout(64, 64, 4, resident=2))


#: What a GPU runs beside them: the rung's own layouts.
LARGE_GRADIENTS = {
    "d 64": Gradients(LARGE["d 64"], _LARGE_KEYS[64]),
    "d 64, causal": Gradients(LARGE["d 64, causal"], _LARGE_KEYS[64]),
    "d 64, causal, sums one by one": Gradients(
        LARGE["d 64, causal"], _LARGE_KEYS[64], is_wide=False
    ),
    "d 128, causal": Gradients(_by_rows(LARGE["d 128, causal"]), _LARGE_KEYS[128]),
    "d 128, a window": Gradients(_by_rows(LARGE["d 128, a window"]), _LARGE_KEYS[128]),
    "d 256": Gradients(LARGE["d 256"], MmaKeyLayout(64, 64, 4, 32), 2),
    "d 256, two halves": Gradients(LARGE["d 256"], MmaRoleLayout(64, 64, 8, 32)),
    "d 200 and 160, two halves": Gradients(
        LARGE["d 200 and 160"]._replace(layout=MmaLayout(64, 32, 4)),
        MmaRoleLayout(64, 64, 8, 32),
    ),
    "d 65 and 33": Gradients(
        _by_rows(LARGE["d 65 and 33"]), MmaKeyLayout(64, 128, 4, 32, resident=2)
    ),
}
