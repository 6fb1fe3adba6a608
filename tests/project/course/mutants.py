"""Common mistakes: task, file, what the solution says, what stands there instead, and the sentence earned.

Each is one exchange of text in the solution. The sentence is part of what the grader prints.
"""

OPS, NN, DATA = "minitorch/operators.py", "minitorch/nn.py", "minitorch/tensor_data.py"
LINES, FLASH1 = "kernels/reference/lines.py", "kernels/cuda/attention/flash1.py"
COURSE = "minitorch/backends/course_kernels.py"
AUTODIFF, LADDER = "minitorch/autodiff.py", "kernels/reference/softmax_ladder.py"
FLASH2 = "kernels/cuda/attention/flash2/forward.py"
FORMULAS = "kernels/traffic/formulas.py"
LAYERS = "minitorch/models/transformer_layers.py"

MUTANTS = [
    ("0.1", OPS, "return math.exp(x)", "return 1.0 + x + x * x / 2.0", "exp("),
    ("0.1", OPS, "return math.exp(x)", "return 7.0", "returns 7.0, expected"),
    ("0.1", OPS, "if x >= 0.0:", "x = 2.0 * x\n    if x >= 0.0:", "sigmoid("),
    ("0.1", OPS, "return 1.0 if x < y else 0.0", "return x < y", "of type bool, not a float"),
    ("0.1", OPS, "return x * y", "return type('F', (float,), {'__eq__': lambda *a: True})(x + y)",
     "of type F, not a float"),
    ("0.1", OPS, "return math.log(x + EPS)", "return math.log(x)", "math domain error"),
    ("0.2", "tests/minitorch/test_operators.py", "assert mul(a, b) == mul(b, a)", "pass",
     "passes with a broken mul"),
    ("0.3", OPS, "strict=True", "strict=False", "zip(strict=True)"),
    ("0.4", "minitorch/module.py", "f\"{child_name}.{name}\"", "name", "first.weight"),
    ("1.1", AUTODIFF, "(f(*above) - f(*below)) / (2.0 * epsilon)",
     "(f(*above) - f(*vals)) / epsilon", "two-sided difference"),
    ("1.4", AUTODIFF, "derivatives[key] + d_parent if key in derivatives else d_parent", "d_parent",
     "used more than once"),
    ("2.1", DATA, "tuple([self.strides[dim] for dim in order])", "self.strides", "permute"),
    ("2.2", DATA, "big_index[dim + offset] if shape[dim] > 1 else 0", "big_index[dim + offset]",
     "a dimension of size 1 has index 0 only"),
    ("1.2", "minitorch/scalar_functions.py", "operators.neg(a)", "a", "neg"),
    ("2.3", "minitorch/tensor_ops.py", "fn(out[position], a_storage", "fn(0.0, a_storage", "worst at"),
    ("2.4", "minitorch/functions/views.py", "sorted(range(len(dims)), key=lambda i: dims[i])",
     "dims", "permute"),
    ("3.3", COURSE, "cuda.syncthreads()  # every fold is stored before another thread reads it", "pass",
     "cuda.syncthreads() is missing above line"),
    ("3.4", COURSE, "cuda.syncthreads()  # both tiles are complete before any thread reads them", "pass",
     "cuda.syncthreads() is missing above line"),
    ("3.1", "minitorch/fast_ops.py", "out[i] = fn(in_storage[i])", "out[i] = in_storage[i]", "worst at"),
    ("3.2", "minitorch/fast_ops.py", "i += a_strides[2]", "i += 1", "worst at"),
    ("4.1", "minitorch/fast_conv.py", "step = -1 if reverse else 1", "step = 1", "worst at"),
    ("4.2", "minitorch/fast_conv.py", "step = -1 if reverse else 1", "step = 1", "worst at"),
    ("4.3", NN, "split.permute(0, 1, 2, 4, 3, 5)", "split.permute(0, 1, 4, 2, 3, 5)", "worst at"),
    ("4.4", NN, "(input - _shift(input, dim)).exp()", "input.exp()", "softmax"),
    ("5.1", LADDER, "total * np.exp(maximum - new_maximum)", "total", "must shrink by e^(m - m_new)"),
    ("5.2", LINES, "return p * (dp - delta[..., None])", "return p * dp", "D is left out"),
    ("5.2", LINES, "delta if dlse is None else delta - dlse", "delta", "dlse is left out"),
    ("5.2", LINES, "dq = scale * (ds @ k)", "dq = ds @ k", "τ is missing"),
    ("5.3", LINES, "rescale[..., None] * rows.acc", "rows.acc", "is the accumulator rescaled?"),
    ("5.3", LINES, "shift = shift_of(row_max)\n", "shift = row_max\n", "sees nothing in a tile"),
    ("5.3", LINES, "shift_of(rows.row_max) + log(rows.row_sum)", "log(rows.row_sum)", "lse lacks m"),
    ("5.4", FLASH1, "cuda.syncthreads()  # S is complete before a thread reads a whole row of it",
     "pass", "cuda.syncthreads() is missing above line"),
    ("5.4", FLASH1, "old_weight[r] = real(math.exp(old_max - shift)) * old_sum",
     "old_weight[r] = old_sum", "neither the sum nor the accumulator shrinks"),
    ("5.5", FLASH1, "prob * (dp * z - delta[r])", "prob * dp * z", "D is left out"),
    ("5.6", "kernels/common/philox.py", "own >> HALF if col % 2 else own & HALF_MASK",
     "own & HALF_MASK", "has the high half of word"),
    ("5.7", FLASH2, "acc[i, c] *= rescale", "acc[i, c] *= 1", "is the accumulator rescaled?"),
    ("5.8", FORMULAS, '"k": Traffic(visited * dim, 0)', '"k": Traffic(shape.seq_k * dim, 0)',
     "by formula, by meter"),
    ("5.9", "kernels/sparsity/tile_lists.py", "np.append(0, np.cumsum(", "np.append(0, 1 * (", "assert"),
    ("5.10", LAYERS, "x = x + self.ff(self.ln_2(x))", "x = self.ff(self.ln_2(x))", "that + ff(ln_2(that))"),
]  # fmt: skip
