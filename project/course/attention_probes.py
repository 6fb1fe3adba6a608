"""What the grader calls of a student's code in module 5, with drawn arguments; see ``probing``."""

# ruff: noqa: B023 - a function that is yielded is called before the next one
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from course.probes import Probes, Rng, after, drawn


def ladder(rng: Rng) -> Probes:
    s, block = import_module("kernels.reference.softmax_ladder"), int(rng.integers(2, 5))
    x, large = np.sort(rng.normal(0.0, 3.0, 11)), rng.normal(1e3, 3.0, 11)
    large[: rng.integers(0, 5)] = -np.inf
    yield "naive_softmax", lambda: s.naive_softmax(x)
    yield "safe_softmax", lambda: s.safe_softmax(large)
    yield "online_statistics", lambda: s.online_statistics(x, block)
    yield "online_softmax", lambda: s.online_softmax(large, block)


def heads(rng: Rng, seq_q: int, seq_k: int, dim: int) -> list[Any]:
    """Draw q, k, v, dout and dlse of two heads.

    The scores of the last query grow from key to key in one head, so that each tile raises the maximum,
    and shrink in the other.
    """
    q, k, v, dout = (rng.normal(size=(1, 2, n, dim)) for n in (seq_q, seq_k, seq_k, seq_q))
    order = np.argsort((k @ q[..., -1, :, None]) * [[[[1]], [[-1]]]], axis=2)
    return [q, np.take_along_axis(k, order, axis=2), v, dout, rng.normal(size=(1, 2, seq_q))]


def attend(
    target: str, rung: str, arrays: Sequence[Any], tile: Any = None, backward: bool = False,
    saved: Sequence[Any] = (), **options: Any,
) -> Callable[[], list[Any]]:  # fmt: skip
    """Return a function that runs one rung and returns out and lse, and gradients if asked to.

    With ``saved``, an out and an lse, only the backward pass runs.
    """
    launch, problems = import_module("kernels.launch"), import_module("kernels")
    operands_of = import_module("kernels.problem.operands").make_operands
    on = getattr(launch, target)
    there = (
        import_module("kernels.runtime.targets").cuda.to_device if on is launch.CUDA else np.asarray
    )

    def run() -> list[Any]:
        mask = options.get("attn_mask")
        q, k, v, dout, dlse = map(there, arrays)
        problem = problems.make_problem(*arrays[:3], rung=rung, **options)
        masks = {} if mask is None else {"attn_mask": there(mask)}
        operands = operands_of(on.memory, problem, q, k, v, masks)
        out, lse, rest = (
            (*map(there, saved), None) if saved else launch.forward(on, problem, operands, tile)
        )
        if not backward:
            return [out, lse]
        operands = operands.having(out=out, lse=lse, lse_rest=rest, dout=dout, dlse=dlse)
        found = launch.backward(on, problem, operands, tile)
        return [out, lse, found.dq, found.dk, found.dv]

    return run


#: A causal mask under which the first row sees nothing, and its neighbours in a tile of any size do.
CAUSAL = {"is_causal": True, "causal_offset": -1}


def textbook(rng: Rng) -> Probes:
    for name, options in (("plain", {}), ("causal", CAUSAL)):
        arrays = heads(rng, 5, 6, 3)
        yield f"forward, {name}", attend("NUMPY", "naive", arrays, **options)
        yield f"backward, {name}", attend("NUMPY", "naive", arrays, None, True, **options)
    arrays[0] *= 1e3
    yield "large scores", attend("NUMPY", "naive", arrays)
    s, z, v = rng.normal(size=(4, 5)), rng.integers(0, 3, (4, 5)), rng.normal(size=(5, 3))
    softmax_times = import_module("kernels.reference.lines").softmax_times
    yield "dropout", lambda: softmax_times(s, z, v)


def tiles(rng: Rng) -> Probes:
    lines = import_module("kernels.reference.lines")
    for name, options in (("plain", {}), ("causal", CAUSAL)):
        arrays, tile = heads(rng, 6, 8, 3), tuple(rng.integers(2, 5, 2).tolist())
        arrays[0] *= 1e3
        yield name, attend("NUMPY", "flash2", arrays, tile, **options)
    s, z, v = rng.normal(size=(4, 6)), rng.integers(0, 3, (4, 6)), rng.normal(size=(6, 3))

    def dropped() -> Any:
        rows = lines.Rows(np.full(4, -np.inf), np.zeros(4), np.zeros((4, 3)))
        for part in (slice(0, 2), slice(2, 6)):
            rows = lines.add_tile(rows, s[:, part], z[:, part], v[part])
        return lines.finished(rows)

    yield "dropout", dropped


def algorithm_1(rng: Rng) -> Probes:
    practice = import_module("kernels.cuda.attention.practice")
    cuda = import_module("kernels.runtime.targets").cuda
    float64 = import_module("numba").types.float64
    arrays, (rows, cols), scale = (
        heads(rng, 4, 8, 2),
        rng.integers(2, 4, 2).tolist(),
        float(drawn(rng)),
    )
    q, k, v, out = (cuda.to_device(x[0]) for x in arrays[:4])
    s, row_max, row_sum = (cuda.to_device(np.zeros(x)) for x in ((2, 4, 8), (2, 4), (2, 4)))
    run = practice.algorithm0[(2, 2), 2]
    yield "algorithm0", after(run, out, q, k, v, s, out, scale)
    run = practice.make_flash1_rows(rows, cols, 2, float64)[2, rows]
    yield "flash1_rows", after(run, out, q, k, v, out, row_max, row_sum, scale)
    for name, options in (("plain", {}), ("causal", CAUSAL)):
        yield f"flash1, {name}", attend("CUDA", "flash1", arrays, (rows, cols), **options)


def backward_1(rng: Rng) -> Probes:
    flash1 = import_module("kernels.cuda.attention.flash1")
    device_function = import_module("kernels.cuda.runtime.kernel").device_function
    make, kernel = flash1.make_score_functions, flash1.backward_kernel
    factor, step = float(drawn(rng)), int(rng.integers(2, 4))

    @device_function
    def kept(place: Any, extras: Any) -> float:  # that of the library is task 5.6
        return 0.0 if (place.row + place.col) % step == 0 else factor

    def with_factors(call: Callable[[], Any]) -> Any:
        with import_module("pytest").MonkeyPatch.context() as patch:
            patch.setattr(
                flash1, "make_score_functions", lambda *args: make(*args)._replace(kept=kept)
            )
            patch.setattr(flash1, "backward_kernel", kernel.__wrapped__)
            return call()

    dropout = {"dropout_p": 0.4, "seed": 1}
    for name, options in (("plain", {}), ("causal", CAUSAL), ("dropout", dropout)):
        arrays, tile = heads(rng, 3, 4, 2), tuple(rng.integers(2, 4, 2).tolist())
        saved = rng.normal(size=(1, 2, 3, 2)), rng.uniform(2.0, 4.0, (1, 2, 3))
        call = attend("CUDA", "flash1", arrays, tile, True, saved, **options)
        yield name, lambda: with_factors(call) if name == "dropout" else call()


def masks(rng: Rng) -> Probes:
    philox = import_module("kernels.common.philox")
    rate, seed = float(rng.uniform(0.3, 0.7)), int(rng.integers(1 << 30))
    places, threshold = rng.integers(0, 64, (64, 3)).tolist(), philox.attention_threshold(rate)
    yield "keep", lambda: [bool(philox.PLAIN.keep(seed, *x, threshold)) for x in places]
    yield (
        "keep, at the threshold",
        lambda: [
            bool(philox.PLAIN.keep(seed, *x, half))
            for x in places[:8]
            for word in philox.PLAIN.attention_words(seed, *x[:2], x[2] // philox.COLUMNS)
            for half in (int(word) >> 16, int(word) & 0xFFFF)
        ],
    )
    arrays, seen = heads(rng, 3, 4, 2), rng.random((1, 2, 3, 4))
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("a boolean mask", {"attn_mask": seen < 0.6}),
        ("a floating mask", {"attn_mask": seen}),
        ("dropout", {"dropout_p": rate, "seed": seed, "backward": True}),
    )
    for name, options in cases:
        yield name, attend("CUDA", "flash1", arrays, (2, 3), **options)


def flash2(rng: Rng) -> Probes:
    split_keys: Any = import_module("kernels.cuda.attention.split_keys")
    # One block computes all keys of a query tile, so that it has earlier sums to rescale.
    split_keys.SIZES = replace(split_keys.SIZES, split_blocks=0)
    more = CAUSAL | {"dropout_p": 0.4, "seed": int(rng.integers(1 << 30))}
    for name, options in (("plain", {}), ("causal, with dropout", more)):
        yield name, attend("CUDA", "flash2", heads(rng, 4, 10, 2), (4, 4), **options)


def traffic(rng: Rng) -> Probes:
    formulas = import_module("kernels.traffic.formulas")
    best = import_module("kernels.traffic.tile_budget").least_traffic_tile
    sizes, tile = rng.integers(8, 40, 4).tolist(), tuple((4 * rng.integers(1, 4, 2)).tolist())
    shape = formulas.HeadShape(*sizes, *(rng.integers(1, 20, 2) * (-1, 1)).tolist())
    for rung in ("flash1", "flash2"):
        formula, elements = getattr(formulas, f"{rung}_traffic"), int(rng.integers(600, 4000))
        yield (
            f"{rung}_traffic",
            lambda: [[x, *counts] for x, counts in sorted(formula(shape, tile).items())],
        )
        yield f"least_traffic_tile, {rung}", lambda: best(rung, shape, elements)


def block_sparse(rng: Rng) -> Probes:
    block_mask = import_module("kernels").BlockMask
    mask = block_mask(rng.integers(0, 2, (2, 3, 4)), 40, 50, 16)
    for by_keys in (False, True):
        # Tiles of 24 rows contain parts of two blocks, and are seldom full.
        found, tile = mask.tile_list, (24, int(8 * rng.integers(1, 4)))
        yield f"tile_list, by_keys={by_keys}", lambda: [
            (x := found(*tile, by_keys)).tile_ptr, x.tile_ids, x.tile_full
        ]  # fmt: skip
    first = rng.integers(0, 2, (1, 1, 3))
    small = block_mask(np.concatenate([first, 1 - first]), 4, 40, 16)  # two heads that differ
    yield "flash2", attend("CUDA", "flash2", heads(rng, 4, 40, 2), (4, 16), block_mask=small)


def transformer(rng: Rng) -> Probes:
    m, seed = import_module("minitorch"), int(rng.integers(1 << 30))
    x, ids = m.from_numpy(rng.normal(size=(2, 4, 6)), m.SimpleBackend), rng.integers(0, 5, (2, 5))

    def made(kind: str, *sizes: int, **options: Any) -> Any:
        m.manual_seed(seed)
        return getattr(m, kind)(*sizes, **{"p_dropout": 0.0, **options})

    def layer() -> Any:
        one = made("TransformerLayer", 6, 2, attention="naive")
        for factor, norm in enumerate((one.ln_1, one.ln_2), 2):  # as different as after training
            norm.weights.update(norm.weights.value.detach() * factor)
        return one(x)

    naive = {"attention": "naive", "causal": True}
    yield "split_heads", lambda: made("MultiHeadAttention", 6, 2, **naive).split_heads(x)
    yield "attention", lambda: made("MultiHeadAttention", 6, 2, **naive)(x)
    yield "layer", layer
    dropped = {"attention": "naive", "p_dropout": 0.8}
    yield "dropout", lambda: (made("MultiHeadAttention", 6, 2, **dropped)(x).to_numpy() == 0).any()
    more = {"n_layer": 1, "middle_dim": 6, "backend": m.SimpleBackend}
    yield "loss", lambda: made("DecoderLM", 5, 6, 2, 8, **more).loss(ids[:, :-1], ids[:, 1:])


def forward_mode(rng: Rng) -> Probes:
    lines = import_module("kernels.reference.lines")
    p, s_tangent = rng.dirichlet(np.ones(6), (2, 4)), rng.normal(size=(2, 4, 6))
    yield "softmax_tangent", lambda: lines.softmax_tangent(p, s_tangent)
    yield "a masked row", lambda: lines.softmax_tangent(0.0 * p, s_tangent)


def parts(rng: Rng) -> Probes:
    lines = import_module("kernels.reference.lines")
    first, second = (
        lines.Rows(
            rng.normal(0.0, 3.0, (2, 4)), rng.uniform(1.0, 3.0, (2, 4)), rng.normal(size=(2, 4, 3))
        )
        for _ in range(2)
    )
    unseen = lines.Rows(np.full((2, 4), -np.inf), np.zeros((2, 4)), np.zeros((2, 4, 3)))
    yield "merged", lambda: lines.merged(first, second)
    yield "a masked part", lambda: [lines.merged(first, unseen), lines.merged(unseen, unseen)]


def pages(rng: Rng) -> Probes:
    lines = import_module("kernels.reference.lines")
    table, positions = rng.permutation(15).reshape(3, 5), rng.integers(0, 20, (3, 7))
    yield "page_places", lambda: lines.page_places(table, positions, 4)


def tape(rng: Rng) -> Probes:
    naive, scores = import_module("minitorch.attention.naive"), rng.normal(size=5)
    calls: list[Any] = []  # one for each score, where a quotient of differences makes two

    def score_mod(s: Any, b: int, h: int, row: int, col: int) -> Any:
        calls.append(s)
        return s * s.sigmoid() * row - col

    slope = naive.taped_derivative(score_mod)
    yield "taped_derivative", lambda: [
        [slope(s, 0, 0, 3, 1) for s in scores.tolist()], float(len(calls))
    ]  # fmt: skip


PROBES: dict[str, Callable[[Rng], Probes]] = {
    "5.1": ladder, "5.2": textbook, "5.3": tiles, "5.4": algorithm_1, "5.5": backward_1,
    "5.6": masks, "5.7": flash2, "5.8": traffic, "5.9": block_sparse, "5.10": transformer,
    "5.11": forward_mode, "5.12": parts, "5.13": pages, "5.14": tape,
}  # fmt: skip
