"""Wrong calls that make tensors, and of ``Tensor.flash_attention``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

import minitorch as mt
from kernels import BlockMask
from minitorch import SimpleBackend, Tensor, TensorData, from_numpy, tensor

from .cases import wrong
from .kernels import raises_late

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false

HUGE = 10**400
RAGGED = [[1.0], [2.0, 3.0]]


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


FACTORIES = {
    "zeros of two numbers": wrong(
        lambda o: mt.zeros(2, 3), TypeError, "backend must be", "3 (int)", "one tuple"
    ),
    "zeros of half a size": wrong(
        lambda o: mt.zeros((2.5,), o.backend), ValueError, "whole numbers", "(2.5,)"
    ),
    "ones of text": wrong(lambda o: mt.ones("ab", o.backend), ValueError, "whole numbers", "'ab'"),
    "rand below 0": wrong(
        lambda o: mt.rand((2, -1), o.backend), ValueError, "none below 0", "(2, -1)"
    ),
    "randn of nothing": wrong(
        lambda o: mt.randn(None, o.backend), ValueError, "whole numbers", "None"
    ),
    "rand of a nested shape": wrong(
        lambda o: mt.rand(((2, 3),), o.backend), ValueError, "whole", "((2, 3),)"
    ),
    "zeros beyond memory": wrong(
        lambda o: mt.zeros((10**9, 10**9), o.backend), MemoryError, "(1000000000, 1000000000)",
        "GiB", "smaller"
    ),
    "rand beyond memory": wrong(
        lambda o: mt.rand((10**9, 10**9), o.backend), MemoryError, "GiB", "smaller"
    ),
    "zeros of many dimensions": wrong(
        lambda o: mt.zeros((1,) * 40, o.backend), ValueError, "32 dimensions", "40", "view"
    ),
    "zeros of a dtype unknown": wrong(
        lambda o: mt.zeros((2,), o.backend, dtype="float8"), TypeError, "float16", "'float8'",
        "numpy.float32"
    ),
    "zeros of complex numbers": wrong(
        lambda o: mt.zeros((2,), o.backend, dtype=complex), TypeError, "integers or booleans",
        "complex128"
    ),
    "zeros of objects": wrong(
        lambda o: mt.zeros((2,), o.backend, dtype=object), TypeError, "got object"
    ),
    "ones by a backend's name": wrong(
        lambda o: mt.ones((2,), "fast"), TypeError, "FastBackend", "'fast'"
    ),
    "ones by operations": wrong(
        lambda o: mt.ones((2,), mt.FastOps), TypeError, "FastBackend", "FastOps"
    ),
    "learnt whole numbers": wrong(
        lambda o: mt.zeros((2,), o.backend, True, int), TypeError, "gradients", "int64",
        "to(numpy.float32)"
    ),
    "full of nothing": wrong(
        lambda o: mt.full((2,), None, o.backend), TypeError, "a number", "None"
    ),
    "full of text": wrong(
        lambda o: mt.full((2,), "a", o.backend), TypeError, "a number", "'a'", "float()"
    ),
    "full of a list": wrong(
        lambda o: mt.full((2,), [1, 2], o.backend), TypeError, "a number", "[1, 2]"
    ),
    "full of complex numbers": wrong(
        lambda o: mt.full((2,), 1j, o.backend), TypeError, "a number", "1j"
    ),
    "whole halves": wrong(
        lambda o: mt.full((2,), 1.5, o.backend, dtype=int), ValueError, "int64 holds whole numbers",
        "1.5"
    ),
    "bytes beyond": wrong(
        lambda o: mt.full((2,), 300, o.backend, dtype=np.int8), ValueError, "-128 to 127", "300",
        "wider"
    ),
    "like this one below 0": wrong(
        lambda o: o.matrix.zeros((-1, 2)), ValueError, "none below 0", "(-1, 2)"
    ),
    "joined numbers": wrong(lambda o: mt.cat(2), TypeError, "must be a list or a tuple", "2 (int)"),
    "stacked number": wrong(
        lambda o: mt.stack(np.array(1.0)), TypeError, "must be a list or a tuple", "shape ()"
    ),
    "joined nothing": wrong(lambda o: mt.cat([]), ValueError, "at least one tensor"),
    "gradients by an array": wrong(
        lambda o: from_numpy(np.ones(2), o.backend, np.ones(2)), TypeError, "requires_grad must be",
        "shape (2,)"
    ),
    "tensor of texts": wrong(
        lambda o: tensor(["a"], o.backend), ValueError, "needs numbers", "['a']"
    ),
    "tensor of nothing": wrong(
        lambda o: tensor([1.0, None], o.backend), ValueError, "needs numbers", "None"
    ),
    "tensor of ragged lists": wrong(
        lambda o: tensor(RAGGED, o.backend), ValueError, "equal lengths", "[[1.0]"
    ),
    "tensor of a dict": wrong(
        lambda o: tensor({"a": 1}, o.backend), ValueError, "needs numbers", "{'a': 1}"
    ),
    "tensor of complex numbers": wrong(
        lambda o: tensor([1j], o.backend), ValueError, "complex128", "convert"
    ),
    "tensor of huge numbers": wrong(
        lambda o: tensor([HUGE], o.backend), ValueError, "needs numbers", "object"
    ),
    "tensor of a generator": wrong(
        lambda o: tensor((i for i in range(3)), o.backend), ValueError, "needs numbers", "generator"
    ),
    "tensor of a masked array": wrong(
        lambda o: tensor(np.ma.MaskedArray([1.0]), o.backend), TypeError, "masked array", "filled"
    ),
    "tensor of a device's array": wrong(
        lambda o: tensor(OnDevice(), o.backend), TypeError, "on the host", "OnDevice", "from_dlpack"
    ),
    "tensor with a shape": wrong(
        lambda o: tensor([1.0], (1,)), TypeError, "backend must be", "(1,)"
    ),
    "from_numpy of texts": wrong(
        lambda o: from_numpy(["a"], o.backend), TypeError, "float32", "<U1", "astype"
    ),
    "from_numpy of nothing": wrong(
        lambda o: from_numpy(None, o.backend), TypeError, "float32", "object"
    ),
    "from_numpy of ragged lists": wrong(
        lambda o: from_numpy(RAGGED, o.backend), ValueError, "equal lengths", "pad the shorter"
    ),
    "from_numpy of records": wrong(
        lambda o: from_numpy(np.zeros(2, [("a", "f4")]), o.backend), TypeError, "'a'", "astype"
    ),
    "from_numpy of a masked array": wrong(
        lambda o: from_numpy(np.ma.MaskedArray([1.0], [True]), o.backend), TypeError,
        "masked array", "filled"
    ),
    "from_numpy of DLPack": wrong(
        lambda o: from_numpy(Unreadable(), o.backend), TypeError, "DLPack alone", "from_dlpack"
    ),
    "from_numpy by a backend's name": wrong(
        lambda o: from_numpy(np.ones(2), "fast"), TypeError, "FastBackend", "'fast' (str)"
    ),
    "from_numpy of learnt ids": wrong(
        lambda o: from_numpy(np.ones(2, int), o.backend, True), TypeError, "int64",
        "to(numpy.float32)"
    ),
    "from_dlpack of a list": wrong(
        lambda o: mt.from_dlpack([1.0]), TypeError, "DLPack", "list", "minitorch.tensor"
    ),
    "from_dlpack of Metal": wrong(
        lambda o: mt.from_dlpack(Unreadable()), TypeError, "type 8", "move it"
    ),
    "a copy of texts": wrong(
        lambda o: mt.tensor_from_numpy(["a"], o.backend), ValueError, "needs numbers", "['a']"
    ),
    "a copy of nothing": wrong(
        lambda o: mt.tensor_from_numpy([None], o.backend), ValueError, "needs numbers", "[None]"
    ),
    "a tensor of no data": wrong(
        lambda o: Tensor((2.5,), backend=SimpleBackend), AssertionError, "TensorData", "tuple"
    ),
    "a tensor of no backend": wrong(
        lambda o: Tensor(TensorData([1.0], (1,))), AssertionError, "SimpleBackend"
    ),
    "default dtype whole": wrong(
        lambda o: mt.set_default_dtype("int32"), TypeError, "float64", "int32"
    ),
    "default dtype nothing": wrong(
        lambda o: mt.set_default_dtype(None), TypeError, "float64", "None"
    ),
    "default dtype unknown": wrong(
        lambda o: mt.set_default_dtype("real"), TypeError, "float64", "'real'"
    ),
    "precision unknown": wrong(
        lambda o: mt.set_matmul_precision("low"), ValueError, "'tf32'", "'low'"
    ),
    "seed text": wrong(
        lambda o: mt.manual_seed("a"), TypeError, "seed must be a whole number", "'a'"
    ),
    "seed nothing": wrong(
        lambda o: mt.manual_seed(None), TypeError, "seed must be a whole number", "None"
    ),
}  # fmt: skip

ATTENTION = {
    "k a Scalar": wrong(
        lambda o: o.heads.flash_attention(mt.Scalar(1.0), o.heads), TypeError, "k must be a tensor"
    ),
    "k a module": wrong(
        lambda o: o.heads.flash_attention(mt.Linear(2, 2), o.heads), TypeError, "k must be a tensor"
    ),
    "lse by an array": wrong(
        lambda o: o.heads.flash_attention(o.heads, o.heads, return_lse=np.ones(2)), TypeError,
        "return_lse must be True or False", "shape (2,)"
    ),
    "k an array": wrong(
        lambda o: o.heads.flash_attention(np.ones((1, 2, 3, 4)), o.heads), TypeError, "k must be",
        "ndarray", "from_numpy"
    ),
    "v nothing": wrong(
        lambda o: o.heads.flash_attention(o.heads, None), TypeError, "v must be", "NoneType"
    ),
    "no v": wrong(lambda o: o.heads.flash_attention(o.heads), TypeError, "missing", "'v'"),
    "shapes": wrong(
        lambda o: o.matrix.flash_attention(o.vector, o.vector), ValueError, "q (2, 3)", "k (4,)",
        "two dimensions"
    ),
    "composed shapes": wrong(
        lambda o: mt.naive_attention(o.matrix, o.vector, o.vector), ValueError, "q (2, 3)", "k (4,)"
    ),
    "composed array": wrong(
        lambda o: mt.naive_attention(o.x, o.heads, o.heads), TypeError, "q must be", "ndarray"
    ),
    "whole numbers": wrong(
        lambda o: o.ids.flash_attention(o.ids, o.ids), TypeError, "int64", "float32", "Tensor.to"
    ),
    "a floating array for a mask": wrong(
        lambda o: o.heads.flash_attention(o.heads, o.heads, np.zeros((3, 3))), TypeError, "tensor",
        "ndarray", "from_numpy"
    ),
    "a mask of ids": wrong(
        lambda o: o.heads.flash_attention(o.heads, o.heads, o.ids), TypeError, "boolean", "int64",
        "mask != 0"
    ),
    "slopes ragged": wrong(
        lambda o: o.heads.flash_attention(o.heads, o.heads, alibi_slopes=[[1.0], [1.0, 2.0]]),
        ValueError, "equal lengths"
    ),
    "slopes to learn": wrong(
        lambda o: o.heads.flash_attention(
            o.heads, o.heads, alibi_slopes=tensor([1.0, 1.0], o.backend, True)
        ),
        ValueError, "alibi_slopes are constants", "detach()"
    ),
    "a mod without its derivative": wrong(
        lambda o: o.heads.flash_attention(o.heads, o.heads, score_mod=lambda s, b, h, r, c: s),
        ValueError, "derivative", "(function, derivative)"
    ),
    "a mod that raises later": wrong(
        lambda o: o.image.flash_attention(o.image, o.image, mask_mod=raises_late), ValueError,
        "never raise"
    ),
    "a block mask of other lengths": wrong(
        lambda o: o.heads.flash_attention(o.heads, o.heads, block_mask=BlockMask.causal(9, 9)),
        ValueError, "9 rows", "3"
    ),
    "packed sums": wrong(
        lambda o: o.packed.flash_attention_varlen(o.packed, o.packed, [0, 5], [0, 4]), ValueError,
        "5 key columns", "[0 4]"
    ),
    "packed sums of floats": wrong(
        lambda o: o.packed.flash_attention_varlen(o.packed, o.packed, tensor([0, 5]), [0, 5]),
        TypeError, "numpy.array"
    ),
    "packed images": wrong(
        lambda o: o.heads.flash_attention_varlen(o.heads, o.heads, [0, 3], [0, 3]), ValueError,
        "(total, heads, dim)"
    ),
    "packed array": wrong(
        lambda o: o.packed.flash_attention_varlen(o.rows, o.packed, [0, 5], [0, 5]), TypeError,
        "k must be", "ndarray"
    ),
}  # fmt: skip
