"""Wrong calls that make tensors, and of ``Tensor.flash_attention``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

import minitorch as mt
from minitorch import SimpleBackend, Tensor, TensorData, from_numpy, tensor

from .cases import elsewhere
from .kernels import raises_late, unknown

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false


class OnDevice:
    """What an array on a device looks like."""

    __cuda_array_interface__: ClassVar[Any] = {
        "shape": (2,),
        "typestr": "<f4",
        "data": (4096, False),
        "version": 3,
    }


class Unreadable:
    """What has DLPack and nothing that NumPy reads."""

    def __dlpack__(self, **options: object) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return 8, 0


FACTORIES = [
    (lambda o: mt.zeros(2, 3), TypeError, "backend must be", "3 (int)", "one tuple"),
    (lambda o: mt.zeros((2.5,), o.backend), ValueError, "whole numbers", "(2.5,)"),
    (lambda o: mt.zeros((10**9, 10**9), o.backend), MemoryError, "(1000000000, 1000000000)", "GiB"),
    (lambda o: mt.zeros((1,) * 40, o.backend), ValueError, "32 dimensions", "40", "view"),
    (lambda o: mt.zeros((2,), o.backend, dtype="float8"), TypeError, "float16", "'float8'"),
    (lambda o: mt.zeros((2,), o.backend, True, int), TypeError, "gradients", "int64"),
    (lambda o: mt.full((2,), None, o.backend), TypeError, "a number", "None"),
    (lambda o: mt.full((2,), 300, o.backend, dtype=np.int8), ValueError, "-128 to 127", "300"),
    (lambda o: mt.cat(2), TypeError, "must be a list or a tuple", "2 (int)"),
    (lambda o: mt.cat([]), ValueError, "at least one tensor"),
    (lambda o: tensor(["a"], o.backend), ValueError, "needs numbers", "['a']"),
    (lambda o: tensor(np.ma.MaskedArray([1.0]), o.backend), TypeError, "masked array", "filled"),
    (lambda o: tensor(OnDevice(), o.backend), TypeError, "on the host", "OnDevice", "from_dlpack"),
    (lambda o: tensor([1.0], (1,)), TypeError, "backend must be", "(1,)"),
    (lambda o: from_numpy(["a"], o.backend), TypeError, "float32", "<U1", "astype"),
    (lambda o: from_numpy(Unreadable(), o.backend), TypeError, "DLPack alone", "from_dlpack"),
    (lambda o: mt.from_dlpack([1.0]), TypeError, "DLPack", "list", "minitorch.tensor"),
    (lambda o: mt.from_dlpack(Unreadable()), TypeError, "type 8", "move it"),
    (lambda o: mt.tensor_from_numpy(["a"], o.backend), ValueError, "needs numbers", "['a']"),
    (lambda o: Tensor((2.5,), backend=SimpleBackend), AssertionError, "TensorData", "tuple"),
    (lambda o: Tensor(TensorData([1.0], (1,))), AssertionError, "SimpleBackend"),
    (lambda o: mt.set_default_dtype("int32"), TypeError, "float64", "int32"),
    (lambda o: mt.set_matmul_precision("low"), ValueError, "'tf32'", "'low'"),
]  # fmt: skip

ATTENTION = [
    (lambda o: o.heads.flash_attention(mt.Scalar(1.0), o.heads), TypeError, "k must be a tensor"),
    (lambda o: o.matrix.flash_attention(o.vector, o.vector), ValueError, "q (2, 3)", "k (4,)"),
    (lambda o: o.heads.flash_attention(o.heads, o.heads, np.zeros((3, 3))), TypeError, "tensor"),
    (lambda o: o.heads.flash_attention(o.heads, o.heads, alibi_slopes=tensor([1.0, 1.0],
     o.backend, True)), ValueError, "alibi_slopes are constants", "detach()"),
    (lambda o: o.heads.flash_attention(o.heads, o.heads, score_mod=unknown),
     ValueError, "`math.gamma(1 + s)`", "(function, derivative)"),
    (lambda o: o.image.flash_attention(o.image, o.image, mask_mod=raises_late), ValueError,
     "never raise"),
    (lambda o: o.packed.flash_attention_varlen(o.packed, o.packed, [0, 5], [0, 4]), ValueError, "[0 4]"),
    (lambda o: o.packed.flash_attention_varlen(o.packed, o.packed, tensor([0, 5]), [0, 5]),
     TypeError, "numpy.array"),
    (lambda o: o.heads.flash_attention_varlen(o.heads, o.heads, [0, 3], [0, 3]), ValueError,
     "(total, heads, dim)"),
    (lambda o: mt.naive_attention(o.heads, o.heads, o.heads, score_mod=unknown),
     ValueError, "`math.gamma(1 + s)`", "(function, derivative)"),
    (lambda o: o.heads.flash_attention(o.heads.to(elsewhere(o)), o.heads), TypeError, "one backend"),
    (lambda o: mt.naive_attention(o.heads, o.heads, o.heads.to(elsewhere(o))), TypeError, "one backend"),
    (lambda o: mt.naive_attention(o.heads, o.heads, o.heads, causal=True), TypeError, "is_causal"),
]  # fmt: skip
