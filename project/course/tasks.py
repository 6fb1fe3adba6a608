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
        free: How many of the tests pass in a starter tree; they give no points.
        speed: How many of the points are for speed, see ``SPEED``.
        simulator: The tests run in the CUDA simulator, so that no GPU is needed.
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
    free: int = 0
    speed: int = 0
    simulator: bool = False
    metered: bool = False
    own_tests: bool = False
    seconds: int = 300
    memory_mb: int = 4096

    @property
    def module(self) -> int:
        """Number of the module."""
        return int(self.id.split(".")[0])

    def points_for(self, passed: int, tests: int) -> int:
        """Return the points, without those for speed, if some of the tests have passed."""
        share = max(passed - self.free, 0) / (tests - self.free)
        return int((self.points - self.speed) * share)

    def is_simulated(self, gpu: bool) -> bool:
        """Tell whether the tests run in the simulator, when there is a GPU to use or there is none."""
        return self.simulator and (self.metered or not gpu)

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
    """

    number: int
    title: str
    scripts: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()


MODULES = (
    Module(0, "Fundamentals", ("run_manual",), ("math_page", "training_page")),
    Module(1, "Autodiff", ("run_scalar",), ("graph_page",)),
    Module(2, "Tensors", ("run_tensor",), ("tensor_page",)),
    Module(3, "Efficiency", ("run_fast_tensor", "parallel_check")),
    Module(4, "Networks", ("run_digits", "run_sentiment"), ("conv_page",)),
    Module(
        5, "FlashAttention", ("train_gpt", "train_tasks", "bench_attention"), ("attention_page",)
    ),
)

OPERATORS = ("tests/minitorch/test_operators.py",)
SCALARS = ("tests/minitorch/test_autodiff.py", "tests/minitorch/test_scalar.py")
DATA, LOOPS = ("tests/minitorch/test_tensor_data.py",), "tests/course/test_loops.py"
TENSORS = (LOOPS, "tests/minitorch/test_tensor.py")
GENERAL = (LOOPS, "tests/minitorch/test_tensor_general.py")
KERNELS = (
    "tests/course/test_course_kernels.py",
    "tests/minitorch/test_cuda_ops.py",
)
SMALL = "tests/course/test_layers.py"
CONV = (SMALL, "tests/minitorch/test_conv.py")
LAYERS = (SMALL, "tests/minitorch/test_nn.py")
FLASH, TRAFFIC = ("tests/course/test_module5.py",), ("tests/course/test_module5_traffic.py",)
#: Measures how fast a right solution is, task by task.
SPEED = "tests/course/speed.py"

TASKS = (
    Task(
        "0.1", "Operators", 10,
        "Sixteen functions of numbers. Backends compile them later, so use arithmetic and the math "
        "module only, and return a float in every branch.",
        OPERATORS,
    ),
    Task(
        "0.2", "Property tests", 10,
        "Write what must hold for every number. A test that detects no broken operator does "
        "not count: break one and check that your test fails.",
        (*OPERATORS, "tests/course/test_property_mutants.py"), own_tests=True,
    ),
    Task(
        "0.3", "Functions of functions", 10,
        "map, zipWith and reduce take a function and return a function; the rest is one line each.",
        (*OPERATORS, "tests/course/test_property_mutants.py"),
    ),
    Task(
        "0.4", "Modules", 10,
        "A module is a tree: do it here, then ask each child to do the same.",
        ("tests/minitorch/test_module.py",),
    ),
    Task(
        "1.1", "Numerical derivative", 5,
        "Two calls of f, a little to the right and a little to the left.",
        SCALARS,
    ),
    Task(
        "1.2", "Scalars, forward", 10,
        "Operators of Scalar apply a ScalarFunction; its forward computes on plain floats and saves "
        "what backward will need.",
        SCALARS, free=1,
    ),
    Task(
        "1.3", "Chain rule", 10,
        "The last function knows its derivatives; pair them with its inputs.",
        SCALARS,
    ),
    Task(
        "1.4", "Backpropagation", 15,
        "Visit a variable only after everything that uses it; then its derivative is complete.",
        SCALARS,
    ),
    Task(
        "2.1", "Tensor data and indexing", 10,
        "A tensor is one flat array: strides turn an index into a position.",
        DATA,
    ),
    Task(
        "2.2", "Broadcasting", 10,
        "Align shapes at the right; a dimension of size 1 stands for any size.",
        DATA,
    ),
    Task(
        "2.3", "Tensor operations", 15,
        "Walk through the positions of the output, and find for each the positions of the inputs.",
        TENSORS,
    ),
    Task(
        "2.4", "Gradients of tensors", 15,
        "As in 1.4, with tensors: the backend has the operations, Tensor.expand undoes broadcasting.",
        TENSORS,
    ),
    Task(
        "3.1", "Parallel map, zip and reduce", 15,
        "The loops of 2.3, compiled. Run the outer loop in parallel, compute no index where the "
        "strides are equal, and call only fn in the inner loop.",
        GENERAL, speed=4, seconds=600,  # many loops are compiled
    ),
    Task(
        "3.2", "Matrix multiplication", 10,
        "Parallel over the rows of the output. Use no index buffers; the inner loop is one product "
        "and one sum.",
        GENERAL, free=8, speed=3,
    ),
    Task(
        "3.3", "CUDA map, zip and reduce", 15,
        "Each thread computes one element; in a reduction, the threads of a block share partial sums. "
        "Put a barrier between one thread's write and another thread's read.",
        KERNELS, free=11, simulator=True,
    ),
    Task(
        "3.4", "CUDA matrix multiplication", 15,
        "Tiles in shared memory: each element is read from global memory once for a tile of the "
        "output, and the output is written once.",
        KERNELS, simulator=True,
    ),
    Task(
        "4.1", "Convolution in one dimension", 10,
        "A sum over channels and over the kernel; what lies outside the input counts as zero.",
        CONV, free=1,
    ),
    Task(
        "4.2", "Convolution in two dimensions", 10, "The same sum with one loop more.", CONV, free=1
    ),
    Task(
        "4.3", "Pooling", 10,
        "Cut the image into tiles with view and permute; pooling is then a mean of rows.",
        LAYERS,
    ),
    Task(
        "4.4", "Softmax, dropout and max", 15,
        "The gradient of a maximum goes to where it is; exp overflows unless the maximum is "
        "subtracted first.",
        LAYERS, free=1,
    ),
    Task(
        "5.1", "The softmax ladder", 5,
        "Naive, safe, online: a sum of exponentials can be brought to a new maximum without reading "
        "anything again. That one line is the idea of FlashAttention.",
        FLASH,
    ),
    Task(
        "5.2", "Composed attention, its gradient", 10,
        "S = τ Q Kᵀ, P = softmax(S), O = P V, and backwards. Derive dS = P ∘ (dP - D) on paper first: "
        "D is rowsum(dO ∘ O).",
        FLASH,
    ),
    Task(
        "5.3", "Tiled attention in NumPy", 10,
        "The online softmax of 5.1 for a tile of rows. Sum the output along with the exponentials, "
        "and normalise it at the end.",
        FLASH, speed=2,
    ),
    Task(
        "5.4", "Algorithm 1 as a CUDA kernel", 15,
        "Three kernels: all of Algorithm 0; the online softmax of an Algorithm 1 with one row for each "
        "thread; and lines 10 to 15 of the rung, whose threads share a tile. Put a barrier wherever a "
        "thread reads what another one has written. The guide has a table of the helpers.",
        FLASH, simulator=True,
    ),
    Task(
        "5.5", "Its backward pass", 15,
        "P is not stored: it is computed again from S and L. Then the gradients of 5.2, tile by tile.",
        FLASH, needs=("5.4",), simulator=True,
    ),
    Task(
        "5.6", "Masks and dropout in the tile", 10,
        "A mask changes a score before the maximum is taken. Dropout comes after the sum, and its "
        "bits are a function of the place alone, so that the backward pass draws them again.",
        FLASH, needs=("5.4", "5.5"), simulator=True,
    ),
    Task(
        "5.7", "FlashAttention-2", 10,
        "Make query tiles the outer loop: O, l and m stay in registers and are written once. Use exp2, "
        "since the scale already includes log2(e).",
        FLASH, simulator=True,
    ),
    Task(
        "5.8", "Traffic, and a budget", 10,
        "Walk through the loops of a kernel with a pencil: how often is each array read, how often "
        "written, and by which tile? Only the meter can say that the formula is right. Then let the "
        "formula choose the tile.",
        TRAFFIC, needs=("5.4", "5.7"), free=2, simulator=True, metered=True,
    ),
    Task(
        "5.9", "Block-sparse attention", 10,
        "Fully masked tiles are skipped. Each row of tiles has a list of the visible ones; the lists are "
        "stored one after the other, and a pointer says where each begins.",
        FLASH, needs=("5.4", "5.7"), speed=2, simulator=True,
    ),
    Task(
        "5.10", "Train the transformer", 10,
        "Heads are a view of the width. Residual connections go around the layer norms.",
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


def tasks_until(module: int) -> list[Task]:
    """Return the tasks of a module and of those before it, in order."""
    return [task for task in TASKS if task.module <= module]


def tasks_of(module: int) -> list[Task]:
    """Return the tasks of one module, in order."""
    return [task for task in TASKS if task.module == module]
