"""Wrong calls of tensors: operators and methods, indices, shapes, views."""

from __future__ import annotations

import numpy as np

import minitorch as mt
from minitorch import IndexingError, Tensor, TensorData, from_numpy, grad, hessian, hvp, jvp

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false

HUGE = 10**400


# AssertionError and IndexingError are what the published course raises, and its tests expect.
OPERATIONS = [
    (lambda o: o.matrix + o.vector, IndexingError, "(2, 3)", "(4,)", "view or permute"),
    (lambda o: o.matrix @ o.matrix, AssertionError, "(2, 3)", "3 columns", "2 rows", "permute"),
    (lambda o: o.matrix @ o.vector, ValueError, "(2, 3)", "(4,)", "two dimensions", "view"),
    (lambda o: o.image @ from_numpy(np.ones((5, 4, 4)), o.backend), IndexingError, "(1, 2) and (5,)"),
    (lambda o: o.wide @ o.matrix, TypeError, "unsupported", "ndarray"),
    (lambda o: o.matrix.f.neg_map(o.matrix, o.vector), IndexingError, "(2, 3)", "(4,)"),
    (lambda o: o.matrix + "1", TypeError, "got str", "minitorch.tensor"),
    (lambda o: o.matrix - None, TypeError, "got NoneType", "convert"),
    (lambda o: o.matrix + HUGE, ValueError, "float64", "401 digits", "divide"),
    (lambda o: o.matrix.sum(2), IndexingError, "dim 2", "(2, 3)", "use -2 to 1"),
    (lambda o: o.matrix.mean(-3), IndexingError, "dim -3", "(2, 3)", "use -2 to 1"),
    (lambda o: mt.Add.apply(1.0, 2.0), TypeError, "Add.apply", "float, float", "minitorch.tensor"),
    (lambda o: o.matrix.to("gpu"), TypeError, "FastBackend", "'gpu'"),
    (lambda o: o.matrix.to(complex), TypeError, "float32", "complex128", "convert"),
    (lambda o: (o.matrix * 1).backward(), AssertionError, "(2, 3)", "sum() first"),
    (lambda o: (o.matrix * 1).backward(o.vector), ValueError, "(2, 3)", "(4,)"),
    (lambda o: (o.matrix * 1).backward(np.ones((2, 3))), TypeError, "grad_output", "ndarray"),
    (lambda o: o.vector.sum().backward(), RuntimeError, "constant", "requires_grad_(True)"),
    (lambda o: o.ids.requires_grad_(True), TypeError, "int64", "to(numpy.float32)"),
    (lambda o: (o.matrix * 1).accumulate_derivative(o.matrix), AssertionError, "only a leaf"),
]  # fmt: skip

SHAPES = [
    (lambda o: o.matrix.permute(0, 0), AssertionError, "0 to 1 once", "(0, 0)", "(2, 3)"),
    (lambda o: o.matrix.permute((1, 0)), TypeError, "one by one", "((1, 0),)", "permute(1, 0)"),
    (lambda o: o.matrix.view(4), AssertionError, "(2, 3)", "6 elements", "(4,)"),
    (lambda o: o.matrix.view((3, 2)), TypeError, "one by one", "view(2, 3)"),
    (lambda o: o.matrix.view(*[1] * 40, 6), ValueError, "32 dimensions", "41", "join"),
    (lambda o: o.flipped.view(6), AssertionError, "(3, 2)", "strides (1, 3)", "contiguous() first"),
    (lambda o: o.matrix[2], IndexingError, "index 2", "dimension 0", "(2, 3)", "-2 to 1"),
    (lambda o: o.matrix[0, 0, 0], IndexingError, "3 dimensions", "(2, 3)"),
    (lambda o: o.matrix[5, 0], IndexingError, "(5, 0)", "(2, 3)", "size - 1"),
    (lambda o: o.matrix[-3, 0], IndexingError, "(-3, 0)", "(2, 3)", "-size"),
    (lambda o: o.matrix[0, 1.5], TypeError, "got 1.5", "to int64"),
    (lambda o: o.matrix[np.ones(3, bool)], IndexingError, "a mask", "(2,) of (2, 3)", "got (3,)"),
    (lambda o: o.matrix[[0, 1], [0, 1, 2]], IndexingError, "broadcast", "(2,) (3,)"),
    (lambda o: o.matrix[0.0:1.0], TypeError, "a slice is made of integers", "0.0"),
    (lambda o: o.matrix.__setitem__(0, 1.0), TypeError, "only single elements", "(2, 3)", "where"),
    (lambda o: o.matrix.__setitem__((0, 0), "a"), TypeError, "a number", "'a' (str)"),
    (lambda o: o.matrix.__setitem__((0, 0), HUGE), ValueError, "401 digits"),
    (lambda o: o.ids.__setitem__((0, 0), 1.5), ValueError, "whole numbers", "1.5"),
    (lambda o: o.ids.__setitem__((0, 0), 2**70), ValueError, "int64 holds", "wider"),
    (lambda o: o.matrix.item(), AssertionError, "one element", "(2, 3) has 6"),
    (lambda o: mt.shape_broadcast((2, 3), (4,)), IndexingError, "(2, 3) and (4,)", "align"),
    (lambda o: TensorData([1.0], (2,)), AssertionError, "2 elements", "has 1"),
    (lambda o: TensorData([1.0], [1]), AssertionError, "a tuple", "[1]"),
    (lambda o: TensorData([1.0, 2.0], (-2, -1)), ValueError, "none below 0", "(-2, -1)"),
    (lambda o: TensorData(np.ones((2, 2)), (2, 2)), ValueError, "flat", "(2, 2)", "reshape(-1)"),
    (lambda o: TensorData(np.ones(2, complex), (2,)), TypeError, "complex128"),
    (lambda o: TensorData("ab", (2,)), ValueError, "list of numbers", "'ab'"),
    (lambda o: TensorData([1.0, 2.0], (2,), (2,)), IndexingError, "(2,)", "2 elements"),
    (lambda o: TensorData([1.0, 2.0], (2,), (-1,)), IndexingError, "negative", "(-1,)"),
    (lambda o: TensorData([1.0, 2.0], (2,), (1, 1)), IndexingError, "different lengths"),
    (lambda o: o.matrix[..., ...], IndexingError, "2 times '...'"),
    (lambda o: o.matrix[::0], ValueError, "zero"),
    (lambda o: o.matrix.reshape(4, 2), ValueError, "(2, 3)", "6 elements"),
    (lambda o: o.matrix.reshape(-1, -1), ValueError, "at most one"),
    (lambda o: o.matrix.flatten(1, 0), ValueError, "got 1 and 0"),
    (lambda o: o.matrix.squeeze(2), IndexingError, "dim 2"),
    (lambda o: o.matrix.split(0), ValueError, "into 0"),
    (lambda o: o.matrix.split([1, 1], 1), ValueError, "sum to 3"),
    (lambda o: mt.cat([o.matrix, 1.0]), TypeError, "got float"),
    (lambda o: mt.cat([o.matrix, o.matrix.T]), ValueError, "(2, 3), (3, 2)"),
    (lambda o: mt.stack([o.matrix, o.matrix.T]), ValueError, "(2, 3), (3, 2)"),
    (lambda o: mt.einsum("ij,jk->ik", o.matrix), ValueError, "1 operands"),
    (lambda o: mt.einsum("ij,j->i", o.matrix, o.vector), ValueError, "sizes 3 and 4"),
    (lambda o: mt.einsum("i->ij", o.vector), ValueError, "each once"),
    (lambda o: mt.einsum("ij->ii", o.matrix), ValueError, "each once"),
    (lambda o: mt.einsum("i", o.matrix), ValueError, "shape (2, 3)"),
    (lambda o: mt.einsum("ijk", o.matrix), ValueError, "shape (2, 3)"),
    (lambda o: mt.einsum("i.->i", o.matrix), ValueError, "letter"),
    (lambda o: mt.einsum("1->1", o.vector), ValueError, "letter"),
    (lambda o: o.vector.clamp(), ValueError, "min= or max="),
    (lambda o: o.vector.topk(5), ValueError, "at most 4"),
    (lambda o: o.vector.sum((0, 0)), ValueError, "once"),
    (lambda o: o.vector.sum(0, keepdim=1), TypeError, "keepdim"),
    (lambda o: o.vector & 1.0, TypeError, "other operand of &"),
    (lambda o: o.ids | o.ids, TypeError, "compare first"),
    (lambda o: o.vector[:0].max(), ValueError, "empty"),
    (lambda o: o.vector.masked_fill(np.zeros(4), 1.0), TypeError, "booleans"),
    (lambda o: mt.arange(1, 2, 0), ValueError, "other than 0"),
    (lambda o: mt.arange(np.inf), ValueError, "finite"),
    (lambda o: mt.arange(1e300), MemoryError, "GiB"),
]  # fmt: skip

DERIVATIVES = [
    (lambda o: grad(o.vector.sum(), o.matrix), RuntimeError, "output 0 of grad is a constant"),
    (lambda o: grad(grad((o.matrix * o.matrix).sum(), o.matrix).sum(), o.matrix), RuntimeError,
     "create_graph=True"),
    (lambda o: grad(o.matrix.sum(), [o.matrix, o.vector]), RuntimeError, "input 1 of grad is a constant"),
    (lambda o: grad(o.matrix.sum(), [o.matrix, o.heads]), ValueError, "depends on input 1", "allow_unused"),
    (lambda o: grad(o.matrix * 2.0, o.matrix), ValueError, "shape (2, 3) needs the gradient to start from"),
    (lambda o: grad(o.matrix.sum(), o.matrix, o.vector), ValueError, "of its shape, (1,), got (4,)"),
    (lambda o: grad(2.0, o.matrix), TypeError, "outputs must be tensors or Scalars, got float"),
    (lambda o: grad([], o.matrix), ValueError, "outputs must be one or more variables"),
    (lambda o: jvp(Tensor.exp, o.matrix, o.vector), ValueError, "each primal needs a tangent of its shape"),
    (lambda o: jvp(lambda x: None, o.matrix, o.matrix), TypeError, "results of the function must be"),
    (lambda o: hessian(Tensor.exp, o.matrix), ValueError, "sum the output"),
    (lambda o: jvp([1.0], o.matrix, o.matrix), TypeError, "function must be a function"),
    (lambda o: hvp([1.0], o.matrix, o.matrix), TypeError, "function must be a function"),
    (lambda o: hessian([1.0], o.matrix), TypeError, "function must be a function"),
    (lambda o: o.matrix.sum().backward(create_graph=1), TypeError, "create_graph"),
]  # fmt: skip
