"""The course as data: its modules and tasks.

What a student writes stands in the library, between the markers of ``starter_trees``; the hint of one
function is there. Here stands what is true of a task as a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task of the course.

    Attributes:
        id: Module and number, "3.2".
        title: A few words.
        points: What it counts.
        hint: The idea that solves it.
        tests: The files whose tests with this task's mark decide.
        needs: Tasks of the same module that it builds on.
        core: The probes and judged functions that the task is about: if one of them is wrong, the task
            gets at most half of its points.
        emulated: The tests can run on the emulated GPU, so that no GPU is needed.
        metered: They run there even if there is a GPU: only there can traffic be counted.
        own_tests: The student writes tests, which are taken from the student; what they test is the
            course's own.
        seconds: Time limit of the grader.
        memory_mb: Memory limit of the grader.
    """

    id: str
    title: str
    points: int
    hint: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    core: tuple[str, ...] = ()
    emulated: bool = False
    metered: bool = False
    own_tests: bool = False
    seconds: int = 300
    memory_mb: int = 4096

    @property
    def module(self) -> int:
        """Number of the module."""
        return int(self.id.split(".")[0])

    def runs_emulated(self, gpu: bool) -> bool:
        """Tell whether the tests run on the emulated GPU, when there is a GPU to use or there is none."""
        return self.emulated and (self.metered or not gpu)

    @property
    def mark(self) -> str:
        """The pytest mark of the tests."""
        return "task" + self.id.replace(".", "_")


@dataclass(frozen=True)
class Module:
    """One module of the course.

    Attributes:
        number: 0 to 5.
        title: A few words.
        scripts: What of ``project/`` belongs to it.
        pages: What of ``project/app_pages`` belongs to it.
        files: What these and its tests share with others.
    """

    number: int
    title: str
    scripts: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


HELPERS = "project/training/script_helpers.py"
POINTS = ("project/training/points.py", HELPERS, "minitorch/datasets.py")
COMPARED = ("minitorch/testing.py", "minitorch/scalars/math_tests.py")
DRAWN = ("tests/tensor_strategies.py", "minitorch/tensors/gradient_check.py")
MODULES = (
    Module(0, "Fundamentals", ("run_manual",), ("math_page", "training_page"), POINTS),
    Module(
        1, "Autodiff", ("run_scalar",), ("graph_page", "training_page"),
        (
            *POINTS, *COMPARED, "minitorch/scalar.py", "minitorch/scalar_functions.py",
            "project/app_pages/expressions.py",
        ),
    ),
    Module(
        2, "Tensors", ("run_tensor",), ("tensor_page", "training_page"),
        (*POINTS, *COMPARED, *DRAWN),
    ),
    Module(
        3, "Efficiency", ("run_fast_tensor", "parallel_check"), ("training_page", "block_page"),
        (
            *POINTS, *COMPARED, *DRAWN, "minitorch/backends/cuda_practice.py",
            "project/run_tensor.py", "tests/course/test_loops.py", "tests/support/cuda_tensors.py",
            "project/course/kernel_text.py", "project/app_pages/block_recording.py",
            "project/common/child.py",
        ),
    ),
    Module(
        4, "Networks", ("run_digits", "run_sentiment"), ("conv_page",),
        (
            *DRAWN, HELPERS, "minitorch/fast_conv.py", "minitorch/functions/convolution.py",
            "project/data/digits.py", "project/data/sentiment.py",
        ),
    ),
    Module(
        5, "FlashAttention", ("train_tasks",), ("attention_page",),
        (
            "project/app_pages/recording.py", "project/app_pages/tile_view.py", "project/common/child.py",
            "project/app_pages/tile_words.py", HELPERS,
            "tests/support/attention/mistakes.py", "project/course/kernel_text.py",
        ),
    ),
)  # fmt: skip

OPERATORS = ("tests/course/test_operators.py",)
SCALARS = ("tests/course/test_autodiff.py", "tests/course/test_scalar.py")
DATA, LOOPS = ("tests/course/test_tensor_data.py",), "tests/course/test_loops.py"
TENSORS = (LOOPS, "tests/course/test_tensor.py")
GENERAL = ("tests/course/test_fast_loops.py", "tests/course/test_tensor_general.py")
KERNELS = (
    "tests/course/test_course_kernels.py",
    "tests/course/test_cuda_ops.py",
)
SMALL = "tests/course/test_layers.py"
CONV = (SMALL, "tests/course/test_conv.py")
LAYERS = (SMALL, "tests/course/test_nn.py")
FLASH, TRAFFIC = ("tests/course/test_module5.py",), ("tests/course/test_module5_traffic.py",)

TASKS = (
    Task(
        "0.1", "Operators", 10,
        "Write sixteen functions of numbers. Backends compile them later, so use only arithmetic and "
        "the math module, and return a float in every branch.",
        OPERATORS,
    ),
    Task(
        "0.2", "Property tests", 10,
        "Test properties that hold for every number. A test that detects no broken operator does "
        "not count, so break an operator and check that your test fails.",
        (*OPERATORS, "tests/course/test_property_mutants.py"), own_tests=True,
    ),
    Task(
        "0.3", "Functions of functions", 10,
        "map, zipWith and reduce take a function and return a function. Each of the other functions "
        "is one line.",
        (*OPERATORS, "tests/course/test_property_mutants.py"),
    ),
    Task(
        "0.4", "Modules", 10,
        "A module is a tree. A method does its work for the module itself, and then calls the same "
        "method of each child.",
        ("tests/course/test_module.py",),
    ),
    Task(
        "1.1", "Numerical derivative", 5,
        "Call f twice, a little to the right of the point and a little to the left.",
        SCALARS,
    ),
    Task(
        "1.2", "Scalars, forward", 10,
        "Each operator of Scalar applies a ScalarFunction, whose method forward computes with plain "
        "floats and saves the values that backward needs.",
        SCALARS,
    ),
    Task(
        "1.3", "Chain rule", 10,
        "The method backward of the function that made a variable returns a derivative for each input. "
        "Pair these derivatives with the inputs.",
        SCALARS,
    ),
    Task(
        "1.4", "Backpropagation", 15,
        "Visit a variable only after all variables that were computed from it, because only then is its "
        "derivative complete. Leave constants out of the order. Use a stack instead of recursion, because "
        "a chain may have 10,000 variables. The task includes eight backward methods.",
        SCALARS,
    ),
    Task(
        "2.1", "Tensor data and indexing", 10,
        "A tensor is stored in one flat array. The strides turn an index into a position in this array.",
        DATA,
    ),
    Task(
        "2.2", "Broadcasting", 10,
        "Align shapes at the right. A dimension of size 1 is stretched to the other size.",
        DATA,
    ),
    Task(
        "2.3", "Tensor operations", 15,
        "Loop over the ordinals of the output. For each of them, find the positions in the inputs.",
        TENSORS,
    ),
    Task(
        "2.4", "Gradients of tensors", 15,
        "Write the backward functions as in 1.4, but with tensors. The backend has the operations "
        "that you need, and Tensor.expand undoes broadcasting.",
        TENSORS,
    ),
    Task(
        "3.1", "Parallel map, zip and reduce", 15,
        "Write the loops of 2.3 for compilation. Run the outer loop in parallel, compute no index if "
        "the strides are equal, and call nothing but fn in the inner loop.",
        GENERAL, core=("tensor_map._map", "tensor_zip._zip", "tensor_reduce._reduce"),
        seconds=600,  # many loops are compiled
    ),
    Task(
        "3.2", "Matrix multiplication", 10,
        "Make the loop over the rows of the output parallel. Use no index buffers. The inner loop has "
        "one multiplication and one addition.",
        GENERAL, needs=("3.1",), core=("_tensor_matrix_multiply",),
    ),
    Task(
        "3.3", "CUDA map, zip and reduce", 15,
        "In map and zip, each thread computes one element. In a reduction, the threads of a block "
        "share partial results. Put a barrier between one thread's write and another thread's read.",
        KERNELS, core=("tensor_reduce._reduce",), emulated=True,
    ),
    Task(
        "3.4", "CUDA matrix multiplication", 15,
        "Load tiles into shared memory. For each tile of the output, read every input element that the "
        "tile needs from global memory only once, and write each element of the output once.",
        KERNELS, core=("_tensor_matrix_multiply",), emulated=True,
    ),
    Task(
        "4.1", "Convolution in one dimension", 10,
        "Sum over the channels and over the kernel. Elements outside the input count as zero.",
        CONV,
    ),
    Task(
        "4.2", "Convolution in two dimensions", 10,
        "This is the convolution of 4.1 with one more loop.",
        CONV,
    ),
    Task(
        "4.3", "Pooling", 10,
        "Cut the image into tiles with view and permute. Average pooling is then the mean "
        "over the last dimension.",
        LAYERS,
    ),
    Task(
        "4.4", "Softmax, dropout and max", 15,
        "The gradient of a maximum goes to every element that equals the maximum. In softmax, exp "
        "overflows unless the maximum is subtracted first.",
        LAYERS,
    ),
    Task(
        "5.1", "The softmax ladder", 5,
        "Write the naive, the safe and the online softmax. The online softmax rescales the sum of "
        "exponentials to each new maximum without reading any value again. FlashAttention is built on "
        "this idea.",
        FLASH, core=("safe_softmax", "online_statistics"),
    ),
    Task(
        "5.2", "Attention and its gradient", 10,
        "Compute S = τ Q Kᵀ, P = softmax(S) and O = P V, and then the gradients. First derive "
        "dS = P ∘ (dP - D) on paper, where D = rowsum(dO ∘ O).",
        FLASH, core=("dropout",),
    ),
    Task(
        "5.3", "Tiled attention in NumPy", 10,
        "Use the online softmax of 5.1 for a tile of rows. Accumulate the output along with the sum of "
        "the exponentials, and divide the output by this sum at the end.",
        FLASH, core=("plain", "dropout"),
    ),
    Task(
        "5.4", "Algorithm 1 as a CUDA kernel", 15,
        "Complete three kernels. In the first two, Algorithm 0 and Algorithm 1, each thread computes one "
        "row. In the third, flash1, the threads of a block share a tile; there you write lines 10 to 13, "
        "15 and 16 of Algorithm 2. Put a barrier between one thread's write and another thread's read. "
        "The page on the kernels has a table of the helpers.",
        FLASH, core=("flash1, plain",), emulated=True,
    ),
    Task(
        "5.5", "The backward pass of Algorithm 1", 15,
        "P is not stored, so recompute S, and P from S and L. Then compute the gradients of 5.2 tile by "
        "tile.",
        FLASH, needs=("5.4",), emulated=True,
    ),
    Task(
        "5.6", "Masks and dropout in the tile", 10,
        "A mask changes a score before the maximum is taken. Dropout acts after the sum. The dropout "
        "bit of a probability is a function of the seed, the head, the row and the column, so the "
        "backward pass draws the same bits again.",
        FLASH, needs=("5.4", "5.5"), emulated=True,
    ),
    Task(
        "5.7", "FlashAttention-2", 10,
        "The outer loop runs over query tiles, so O, l and m stay in registers, and O and L are written "
        "only once. Subtract the maximum from a score first, then take exp2 of log2(e) times the "
        "difference.",
        FLASH, core=("plain", "causal, with dropout"), emulated=True,
    ),
    Task(
        "5.8", "Traffic, and a budget", 10,
        "Go through the loops of a kernel with pencil and paper. How often is each array read and "
        "written, and in which tiles? Compare your formulas with the traffic that the emulated GPU "
        "measures. Then use them to choose a tile.",
        TRAFFIC, needs=("5.4", "5.7"), emulated=True, metered=True,
    ),
    Task(
        "5.9", "Block-sparse attention", 10,
        "The kernel skips fully masked tiles. Each row of tiles has a list of the tiles to visit. The "
        "lists are stored one after the other, with a pointer to the beginning of each list.",
        FLASH, needs=("5.4", "5.7"), emulated=True,
    ),
    Task(
        "5.10", "Train the transformer", 10,
        "Split the width into heads with a view. Each residual connection goes around a layer norm "
        "and the layer after it.",
        FLASH,
    ),
    Task(
        "5.11", "The JVP of softmax", 5,
        "Differentiate P = exp(S - L) along a tangent of S. The derivative of L is a mean of the tangents, "
        "weighted by P.",
        FLASH,
    ),
    Task(
        "5.12", "Merge split keys", 5,
        "Two groups of threads have each seen a part of the keys. Bring their sums to a common maximum, "
        "then add them. A part may be fully masked.",
        FLASH,
    ),
    Task(
        "5.13", "A page table", 5,
        "Look up the page that holds a position in its text's row of the page table, and compute the "
        "place within that page.",
        FLASH,
    ),
    Task(
        "5.14", "The derivative of a score_mod", 5,
        "Apply the function to a tensor of one score, and differentiate the result by "
        "your backpropagation.",
        FLASH,
    ),
)  # fmt: skip


def find_task(name: str) -> Task:
    """Return the task of an id.

    Raises:
        ValueError: If there is none; it names those of the module.
    """
    for task in TASKS:
        if task.id == name:
            return task
    near = [task.id for task in TASKS if re.match(rf"{re.escape(name[:1])}\.", task.id)]
    near = near or [task.id for task in TASKS]
    raise ValueError(f"there is no task {name!r}; there are {', '.join(near)}")


def expression(task: Task, gpu: bool) -> str:
    """Return pytest's ``-m`` for the tests that decide."""
    if task.runs_emulated(gpu):
        return f"{task.mark} and emulated and not cuda"
    return task.mark if task.emulated else f"{task.mark} and not cuda"


def tasks_until(module: int) -> list[Task]:
    """Return the tasks of a module and of those before it, in order."""
    return [task for task in TASKS if task.module <= module]


def tasks_of(module: int) -> list[Task]:
    """Return the tasks of one module, in order."""
    return [task for task in TASKS if task.module == module]
