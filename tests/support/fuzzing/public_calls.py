"""Call public functions with arguments that may be nonsense, and find errors that no check raised.

Every public function, class and method is called by its signature: an argument gets a value that usually
fits its name, or anything.  An error must then come from a ``raise`` in our code, which says what is
wrong.  One that NumPy, numba or the interpreter raises in the middle of a computation is *incidental*.
"""

from __future__ import annotations

import inspect
import linecache
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kernels
import minitorch as mt
from kernels import BlockMask

from .draws import NONSENSE

ROOT = Path(kernels.__file__).parents[1]
OURS = tuple(str(ROOT / floor) for floor in ("kernels", "minitorch"))
#: Longest message: a printed tensor makes one longer, or has several lines.
LONGEST = 600
#: Names of what takes no values of a user's (bases, records, settings of the process), calls the user's
#: function without a check between, writes files, or is shared by compiled loops and the exercises.
LEFT_OUT = {
    "AnomalyError", "CallPlan", "CaptureError", "Context", "CudaKernelOps", "CudaOps",
    "ExpressionGraph", "FastOps", "GraphStep", "History", "IndexingError", "MapProto", "MathTest",
    "MathTestVariable", "Module", "Precision", "Problem", "ScalarFunction", "ScalarHistory", "Shape",
    "SimpleOps", "Storage", "Strides", "TensorBackend", "TensorOps", "UserIndex", "UserShape",
    "UserStrides", "Variable", "accumulate_derivative", "array", "backpropagate", "bfloat16",
    "broadcast_index", "central_difference", "chain_rule", "checkpoint", "cuda", "derivative_check",
    "detect_anomaly", "empty", "float16", "float32", "float64", "grad_central_difference",
    "grad_check", "graph_step", "hessian", "hvp", "index_to_position", "jvp", "matmul_precision",
    "mm_practice", "no_grad", "on", "prod", "save_picture", "set_default_dtype",
    "set_matmul_precision", "shape_broadcast", "strides_from_shape", "sum_practice",
    "takes_attention_options", "tile_list", "tile_patterns", "to_index", "topological_sort", "vjp",
    "wrap",
}  # fmt: skip
OPERATORS = (
    "__add__", "__rsub__", "__mul__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__matmul__",
    "__lt__", "__gt__", "__eq__", "__ne__", "__getitem__", "__setitem__", "__le__", "__ge__", "__and__",
    "__or__", "__invert__", "__abs__",
)  # fmt: skip


class Given:
    """Values to call with: what fits an argument of some name, and what may be passed instead.

    Args:
        rng: Chooses.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        x = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(1, 2, 3, 4)
        fast, slow = (mt.from_numpy(x, backend) for backend in (mt.FastBackend, mt.SimpleBackend))
        learnt, matrix = mt.from_numpy(x, requires_grad=True), mt.from_numpy(x[0, 0])
        ids = mt.from_numpy(np.array([[0, 1, 2]]))
        out, lse = kernels.flash_attention_forward(x, x, x)
        p = mt.Parameter(mt.from_numpy(x[0, 0], requires_grad=True))
        tensors, arrays = (fast, slow, learnt, matrix, ids), (x, np.ones((3, 3), bool), lse)
        layer, blocks = mt.Linear(4, 4, backend=mt.FastBackend), BlockMask.causal(3, 3)
        self.anything: tuple[Any, ...] = (
            *NONSENSE, *tensors, *arrays, p, layer, blocks, mt.FastBackend, "float32", np.zeros((40, 50)),
            mt.zeros((40, 50)), [fast], (matrix, 2), [[1.0]], mt.tensor(1.0), np.array(1.0), np.array(True),
            [p], np.float16(1), np.str_("x"), {"a": 1}, -7, 3, (2, 3), mt.Scalar(1.0),
            np.ones(2, [("a", "f4")]), np.ma.MaskedArray([1.0], [True]), iter([1, 2]), [None],
            [True, False], np.array(["a"]), np.array([None]), "flash", slice(1), np.float32("inf"),
        )  # fmt: skip
        whole, rates, functions = (
            (1, 2, 4),
            (0.0, 0.1, np.float32(0.5)),
            (None, lambda *a: a[0] > 0, abs),
        )
        self.fits: dict[str, tuple[Any, ...]] = {}
        for names, values in (
            ("input x k v q a b y other value residual source grad_output gamma beta scores vals", tensors),
            ("dim start_dim end_dim", (0, -1, 1, None)),
            ("shape order sizes", ((2, 3), (4,), 6, 0, 1)),
            ("tensors layers", ([fast, fast], (matrix, matrix), [layer])),
            ("weights logits bias", (matrix, mt.from_numpy(x[0, 0].T), mt.ones((4,)))),
            ("index target targets", (ids, np.array([0, 1, 2]), [0, 1, 2])),
            ("requires_grad is_causal causal deterministic return_lse exclusive reverse ignore has_gelu",
             (True, False)),
            ("seq_q seq_k block_size block_q block_k heads batch n_embd n_head n_vocab n_positions", whole),
            ("head_dim n_layer in_size out_size num_embeddings embedding_dim capacity num_classes", whole),
            ("n_classes middle_dim left right row col", whole),
            ("rate p_dropout dropout_p lr eps scale softcap", rates),
            ("backend", (mt.FastBackend, mt.SimpleBackend)),
            ("dtype", (None, "float32", np.float64, "int64")),
            ("parameters", ([p], layer.parameters())),
            ("kernel", ((1, 2), (3, 4), (1, 1))),
            ("mask attn_mask", (np.ones((3, 3), bool), None)),
            ("cu_seqlens_q cu_seqlens_k", ([0, 2], np.array([0, 1, 2]))),
            ("mask_mod score_mod", functions),
            ("dout out", (out,)), ("lse", (lse,)), ("array", arrays), ("ls", ([1.0, 2.0], x)),
            ("storage", ([1.0, 2.0], x.reshape(-1))), ("seed", (0, 1, None)), ("condition", (fast, matrix)),
        ):  # fmt: skip
            self.fits |= dict.fromkeys(names.split(), values)
        fused, sizes = mt.FastBackend, (6, 4, 2, 8)
        self.objects: tuple[Any, ...] = (
            fast, learnt, slow, matrix, ids, blocks, layer, mt.Embedding(6, 4),
            mt.LayerNorm1d(4), mt.RMSNorm(4), mt.Dropout(0.1), mt.FeedForward(4, 8),
            mt.MultiHeadAttention(4, 2, backend=fused), mt.TransformerLayer(4, 2, backend=fused),
            mt.DecoderLM(*sizes, n_layer=1, middle_dim=4, backend=fused),
            mt.SequenceClassifier(*sizes, 2, n_layer=1), mt.EncoderLM(*sizes, n_layer=1),
        )  # fmt: skip

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return public functions, classes, and methods of objects, by name."""
        makers = [
            n for n, f in vars(BlockMask).items() if isinstance(f, (staticmethod, classmethod))
        ]
        spaces = [("minitorch", mt, dir(mt)), ("kernels", kernels, kernels.__all__)]
        spaces += [("BlockMask", BlockMask, makers)]
        for place, x in enumerate(self.objects):
            is_module = isinstance(x, mt.Module)
            names = ["forward", "loss", "generate"] if is_module else [*dir(x), *OPERATORS]
            spaces.append((f"{type(x).__name__} {place}", x, names))
        found: dict[str, Callable[..., Any]] = {}
        for space, holder, names in spaces:
            for name in names:
                hidden = name.startswith("_") and name not in OPERATORS
                if (
                    hidden
                    or name in LEFT_OUT
                    or isinstance(getattr(type(holder), name, None), property)
                ):
                    continue
                value = getattr(holder, name, None)
                is_function = inspect.isclass(value) and issubclass(
                    value, mt.Function | mt.Optimizer
                )
                if callable(value) and (not is_function or name in ("SGD", "Adam", "AdamW")):
                    found[f"{space}.{name}"] = value
        return found

    def arguments(self, function: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
        """Choose the arguments of a call."""
        args: list[Any] = []
        named: dict[str, Any] = {}
        for p in inspect.signature(function).parameters.values():
            if p.kind is p.VAR_POSITIONAL:
                args += [self._value(p.name) for _ in range(self.rng.randrange(3))]
            elif p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                args.append(self._value(p.name))
            elif p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and self.rng.random() < 0.15:
                named[p.name] = self._value(p.name)
        return args, named

    def _value(self, name: str) -> Any:
        fits = self.fits.get(name)
        return self.rng.choice(fits if fits and self.rng.random() < 0.75 else self.anything)


def fault(error: Exception) -> str:
    """Return what is wrong with an error: that no check raised it, or that it prints a tensor; or ""."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    file, text = trace.tb_frame.f_code.co_filename, str(error)
    source = linecache.getline(file, trace.tb_lineno).strip()
    where = f"{type(error).__name__} at {file.removeprefix(str(ROOT))}:{trace.tb_lineno}, {source}"
    counted = "positional argument" in text  # Python's own check of how many there are
    if not (counted or (file.startswith(OURS) and source.startswith("raise"))):
        return f"incidental {where}: {text:.200}"
    return f"long message of {where}: {text:.200}" if len(text) > LONGEST or "\n" in text else ""
