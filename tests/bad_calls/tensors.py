"""Wrong calls of tensors: operators and methods, indices, shapes, views."""

from __future__ import annotations

import numpy as np

import minitorch as mt
from minitorch import IndexingError, TensorData, from_numpy

from .cases import wrong

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false

HUGE = 10**400
RAGGED = [[1.0], [2.0, 3.0]]


# AssertionError and IndexingError are what the published course raises, and its tests expect.
OPERATIONS = {
    "add shapes": wrong(
        lambda o: o.matrix + o.vector, IndexingError, "(2, 3)", "(4,)", "view or permute"
    ),
    "less shapes": wrong(lambda o: o.matrix < o.vector, IndexingError, "(2, 3)", "(4,)"),
    "power shapes": wrong(lambda o: o.matrix**o.vector, IndexingError, "(2, 3)", "(4,)"),
    "close shapes": wrong(lambda o: o.matrix.is_close(o.vector), IndexingError, "(2, 3)", "(4,)"),
    "product": wrong(
        lambda o: o.matrix @ o.matrix, AssertionError, "(2, 3)", "3 columns", "2 rows", "permute"
    ),
    "product with a vector": wrong(
        lambda o: o.matrix @ o.vector, ValueError, "(2, 3)", "(4,)", "two dimensions", "view"
    ),
    "product with a number": wrong(
        lambda o: o.matrix @ 2.0, ValueError, "two dimensions", "(1,)"
    ),
    "product of batches": wrong(
        lambda o: o.image @ from_numpy(np.ones((5, 4, 4)), o.backend), IndexingError,
        "(1, 2, 4, 4) and (5, 4, 4)", "(1, 2) and (5,)", "broadcast"
    ),
    "product of an array": wrong(lambda o: o.wide @ o.matrix, TypeError, "unsupported", "ndarray"),
    "map into a smaller tensor": wrong(
        lambda o: o.matrix.f.neg_map(o.matrix, o.vector), IndexingError, "(2, 3)", "(4,)"
    ),
    "add a text": wrong(lambda o: o.matrix + "1", TypeError, "got str", "minitorch.tensor"),
    "subtract nothing": wrong(lambda o: o.matrix - None, TypeError, "got NoneType", "convert"),
    "multiply a list": wrong(lambda o: o.matrix * [1, 2, 3], TypeError, "got list", "convert"),
    "divide by a function": wrong(
        lambda o: o.matrix / len, TypeError, "got builtin_function", "convert"
    ),
    "add an array": wrong(lambda o: np.ones(3) + o.matrix, TypeError, "got ndarray", "from_numpy"),
    "add a complex number": wrong(lambda o: o.matrix + 1j, TypeError, "got complex", "convert"),
    "add NumPy's complex number": wrong(
        lambda o: o.matrix + np.complex64(1), TypeError, "got complex64"
    ),
    "less than nothing": wrong(lambda o: o.matrix < None, TypeError, "got NoneType"),
    "close to text": wrong(lambda o: o.matrix.is_close("a"), TypeError, "got str"),
    "add a huge number": wrong(
        lambda o: o.matrix + HUGE, ValueError, "float64", "401 digits", "divide"
    ),
    "subtract a huge number": wrong(lambda o: o.matrix - HUGE, ValueError, "float64", "401 digits"),
    "divide by a huge number": wrong(
        lambda o: o.matrix / HUGE, ValueError, "float64", "401 digits"
    ),
    "sum beyond": wrong(lambda o: o.matrix.sum(2), IndexingError, "dim 2", "(2, 3)", "use -2 to 1"),
    "mean beyond": wrong(
        lambda o: o.matrix.mean(-3), IndexingError, "dim -3", "(2, 3)", "use -2 to 1"
    ),
    "sum of no dimension": wrong(
        lambda o: from_numpy(np.float32(1), o.backend).sum(0), IndexingError, "shape ()", "reshape"
    ),
    "all beyond": wrong(lambda o: o.matrix.all(7), IndexingError, "dim 7", "(2, 3)", "use -2 to 1"),
    "variance beyond": wrong(lambda o: o.matrix.var(2), IndexingError, "dim 2", "(2, 3)"),
    "sum over two": wrong(
        lambda o: o.matrix.sum((0, 1)), TypeError, "one whole number", "(0, 1)", "once for each"
    ),
    "sum over half": wrong(lambda o: o.matrix.sum(0.5), TypeError, "one whole number", "0.5"),
    "sum over a flag": wrong(lambda o: o.matrix.sum(True), TypeError, "one whole number", "True"),
    "sum over a tensor": wrong(
        lambda o: o.matrix.sum(o.image), TypeError, "one whole number", "a Tensor of shape (1, 2, 4, 4)"
    ),
    "sum over text": wrong(lambda o: o.matrix.sum("0"), TypeError, "one whole number", "'0'"),
    "a function of numbers": wrong(
        lambda o: mt.Add.apply(1.0, 2.0), TypeError, "Add.apply", "float, float", "minitorch.tensor"
    ),
    "a function of one too few": wrong(
        lambda o: mt.Add.apply(o.matrix), TypeError, "missing", "'b'"
    ),
    "to a name": wrong(lambda o: o.matrix.to("gpu"), TypeError, "FastBackend", "'gpu'"),
    "to nothing": wrong(lambda o: o.matrix.to(None), TypeError, "dtype", "None"),
    "to operations": wrong(lambda o: o.matrix.to(mt.FastOps), TypeError, "FastBackend", "FastOps"),
    "to complex numbers": wrong(
        lambda o: o.matrix.to(complex), TypeError, "float32", "complex128", "convert"
    ),
    "to texts": wrong(lambda o: o.matrix.to("U3"), TypeError, "float32", "<U3", "convert"),
    "backward of many": wrong(
        lambda o: (o.matrix * 1).backward(), AssertionError, "(2, 3)", "sum() first"
    ),
    "backward of another shape": wrong(
        lambda o: (o.matrix * 1).backward(o.vector), ValueError, "(2, 3)", "(4,)"
    ),
    "backward from an array": wrong(
        lambda o: (o.matrix * 1).backward(np.ones((2, 3))), TypeError, "grad_output", "ndarray",
        "from_numpy"
    ),
    "backward from a number": wrong(
        lambda o: (o.matrix * 1).sum().backward(2.0), TypeError, "grad_output", "float",
        "minitorch.tensor"
    ),
    "backward of a constant": wrong(
        lambda o: o.vector.sum().backward(), RuntimeError, "constant", "requires_grad_(True)"
    ),
    "expand nothing": wrong(
        lambda o: o.matrix.expand(None), TypeError, "a gradient must be", "NoneType"
    ),
    "expand another shape": wrong(
        lambda o: o.matrix.expand(o.vector), IndexingError, "(2, 3)", "(4,)"
    ),
    "gradient of whole numbers": wrong(
        lambda o: o.ids.requires_grad_(True), TypeError, "int64", "to(numpy.float32)"
    ),
    "gradient perhaps": wrong(
        lambda o: o.matrix.requires_grad_("no"), TypeError, "True or False", "'no'"
    ),
    "accumulate in a result": wrong(
        lambda o: (o.matrix * 1).accumulate_derivative(o.matrix), AssertionError, "only a leaf"
    ),
}  # fmt: skip

SHAPES = {
    "permute twice": wrong(
        lambda o: o.matrix.permute(0, 0), AssertionError, "0 to 1 once", "(0, 0)", "(2, 3)"
    ),
    "permute too few": wrong(lambda o: o.matrix.permute(0), AssertionError, "0 to 1 once", "(0,)"),
    "permute from the right": wrong(
        lambda o: o.matrix.permute(-1, -2), AssertionError, "0 to 1", "(-1, -2)"
    ),
    "permute a tuple": wrong(
        lambda o: o.matrix.permute((1, 0)), TypeError, "one by one", "((1, 0),)", "permute(1, 0)"
    ),
    "permute halves": wrong(
        lambda o: o.matrix.permute(1.5, 0.2), TypeError, "whole numbers", "(1.5, 0.2)"
    ),
    "permute texts": wrong(
        lambda o: o.matrix.permute("1", "0"), TypeError, "whole numbers", "('1', '0')"
    ),
    "permute NaN": wrong(
        lambda o: o.matrix.permute(float("nan"), 0), TypeError, "whole numbers", "nan"
    ),
    "view": wrong(lambda o: o.matrix.view(4), AssertionError, "(2, 3)", "6 elements", "(4,)"),
    "view without a size": wrong(lambda o: o.matrix.view(-1), AssertionError, "(2, 3)", "(-1,)"),
    "view of two negatives": wrong(lambda o: o.matrix.view(-2, -3), AssertionError, "(-2, -3)"),
    "view a tuple": wrong(lambda o: o.matrix.view((3, 2)), TypeError, "one by one", "view(2, 3)"),
    "view halves": wrong(lambda o: o.matrix.view(2.5, 3), TypeError, "whole numbers", "(2.5, 3)"),
    "view text": wrong(lambda o: o.matrix.view("6"), TypeError, "whole numbers", "('6',)"),
    "view infinity": wrong(
        lambda o: o.matrix.view(float("inf")), TypeError, "whole numbers", "inf"
    ),
    "view nothing": wrong(lambda o: o.matrix.view(None), TypeError, "whole numbers", "None"),
    "view without sizes": wrong(
        lambda o: o.matrix.view(), AssertionError, "6 elements", "1 elements"
    ),
    "view of many dimensions": wrong(
        lambda o: o.matrix.view(*[1] * 40, 6), ValueError, "32 dimensions", "41", "join"
    ),
    "view permuted": wrong(
        lambda o: o.flipped.view(6), AssertionError, "(3, 2)", "strides (1, 3)",
        "contiguous() first"
    ),
    "index outside a row": wrong(
        lambda o: o.matrix[2], IndexingError, "index 2", "dimension 0", "(2, 3)", "-2 to 1"
    ),
    "index long": wrong(
        lambda o: o.matrix[0, 0, 0], IndexingError, "3 dimensions", "(2, 3)", "at most one entry for each"
    ),
    "index outside": wrong(lambda o: o.matrix[5, 0], IndexingError, "(5, 0)", "(2, 3)", "size - 1"),
    "index far outside": wrong(
        lambda o: o.matrix[2**70, 0], IndexingError, "1180591620717411303424"
    ),
    "index far outside a row": wrong(
        lambda o: o.matrix[2**70], IndexingError, "1180591620717411303424", "(2, 3)"
    ),
    "index too negative": wrong(
        lambda o: o.matrix[-3, 0], IndexingError, "(-3, 0)", "(2, 3)", "-size"
    ),
    "index a float": wrong(lambda o: o.matrix[0, 1.5], TypeError, "got 1.5", "to int64"),
    "index flags": wrong(lambda o: o.matrix[True, False], TypeError, "made of integers", "got True"),
    "index a list outside": wrong(
        lambda o: o.matrix[[0, 2]], IndexingError, "index 2", "dimension 0", "(2, 3)"
    ),
    "index a mask of another shape": wrong(
        lambda o: o.matrix[np.ones(3, bool)], IndexingError, "a mask", "(2,) of (2, 3)", "got (3,)"
    ),
    "index arrays of two lengths": wrong(
        lambda o: o.matrix[[0, 1], [0, 1, 2]], IndexingError, "broadcast", "(2,) (3,)"
    ),
    "index text": wrong(lambda o: o.matrix["a"], TypeError, "made of integers", "'a'"),
    "index a slice of floats": wrong(
        lambda o: o.matrix[0.0:1.0], TypeError, "a slice is made of integers", "0.0"
    ),
    "set a row": wrong(
        lambda o: o.matrix.__setitem__(0, 1.0), TypeError, "only single elements", "(2, 3)", "where"
    ),
    "set outside": wrong(
        lambda o: o.matrix.__setitem__((0, 3), 1.0), IndexingError, "(0, 3)", "(2, 3)"
    ),
    "set text": wrong(
        lambda o: o.matrix.__setitem__((0, 0), "a"), TypeError, "a number", "'a' (str)"
    ),
    "set nothing": wrong(
        lambda o: o.matrix.__setitem__((0, 0), None), TypeError, "a number", "None"
    ),
    "set a list": wrong(lambda o: o.matrix.__setitem__((0, 0), [1]), TypeError, "a number", "[1]"),
    "set a complex number": wrong(
        lambda o: o.matrix.__setitem__((0, 0), 1j), TypeError, "a number", "1j"
    ),
    "set a huge number": wrong(
        lambda o: o.matrix.__setitem__((0, 0), HUGE), ValueError, "401 digits"
    ),
    "set half an id": wrong(
        lambda o: o.ids.__setitem__((0, 0), 1.5), ValueError, "whole numbers", "1.5"
    ),
    "set NaN for an id": wrong(
        lambda o: o.ids.__setitem__((0, 0), np.nan), ValueError, "whole", "nan"
    ),
    "set an id beyond": wrong(
        lambda o: o.ids.__setitem__((0, 0), 2**70), ValueError, "int64 holds", "wider"
    ),
    "set a slice": wrong(
        lambda o: o.matrix.__setitem__(slice(None), 1.0), TypeError, "slice", "to_numpy()"
    ),
    "item of many": wrong(lambda o: o.matrix.item(), AssertionError, "one element", "(2, 3)"),
    "shapes that do not broadcast": wrong(
        lambda o: mt.shape_broadcast((2, 3), (4,)), IndexingError, "(2, 3) and (4,)", "align"
    ),
    "data of another size": wrong(
        lambda o: TensorData([1.0], (2,)), AssertionError, "2 elements", "has 1"
    ),
    "data with a list for a shape": wrong(
        lambda o: TensorData([1.0], [1]), AssertionError, "a tuple", "[1]"
    ),
    "data of a negative shape": wrong(
        lambda o: TensorData([1.0, 2.0], (-2, -1)), ValueError, "none below 0", "(-2, -1)"
    ),
    "data of a floating shape": wrong(
        lambda o: TensorData([1.0, 2.0], (2.0,)), ValueError, "whole numbers", "(2.0,)"
    ),
    "data of a matrix": wrong(
        lambda o: TensorData(np.ones((2, 2)), (2, 2)), ValueError, "flat", "(2, 2)",
        "reshape(-1)"
    ),
    "data of complex numbers": wrong(
        lambda o: TensorData(np.ones(2, complex), (2,)), TypeError, "complex128"
    ),
    "data of text": wrong(lambda o: TensorData("ab", (2,)), ValueError, "list of numbers", "'ab'"),
    "data of ragged lists": wrong(
        lambda o: TensorData(RAGGED, (2,)), ValueError, "list of numbers", "[[1.0]"
    ),
    "strides beyond": wrong(
        lambda o: TensorData([1.0, 2.0], (2,), (2,)), IndexingError, "(2,)", "2 elements"
    ),
    "strides below 0": wrong(
        lambda o: TensorData([1.0, 2.0], (2,), (-1,)), IndexingError, "negative", "(-1,)"
    ),
    "strides of floats": wrong(
        lambda o: TensorData([1.0, 2.0], (2,), (1.0,)), IndexingError, "whole numbers", "(1.0,)"
    ),
    "strides too many": wrong(
        lambda o: TensorData([1.0, 2.0], (2,), (1, 1)), IndexingError, "different lengths",
        "one stride"
    ),
    "position of half an index": wrong(
        lambda o: o.matrix._tensor.index((0.5, 0)), TypeError, "whole numbers", "(0.5, 0)"
    ),
    "position of text": wrong(
        lambda o: o.vector._tensor.index("a"), TypeError, "whole numbers", "'a'"
    ),
}  # fmt: skip
