"""What the text of a function lacks: parallel loops, barriers, shared memory, or tiles that are read once.

Results do not show a missing barrier, and a submission can forge what is counted in its own process. The
text is read instead, statement by statement. Each access to a shared array has an *owner*: the parts of the
index that depend on the thread. A barrier belongs between two accesses with different owners if one of them
is a write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CUDA_OPS, PRACTICE = "minitorch/cuda_ops.py", "minitorch/backends/cuda_practice.py"
FLASH1 = "kernels/cuda/attention/flash1.py"
FAST_OPS, CONV = "minitorch/fast_ops.py", "minitorch/fast_conv.py"
#: Task → functions whose text is judged: file, name, and how many shared arrays the student's part uses.
KERNELS = {
    "3.1": tuple((FAST_OPS, f"tensor_{name}._{name}", 0) for name in ("map", "zip", "reduce")),
    "3.2": ((FAST_OPS, "_tensor_matrix_multiply", 0),),
    "3.3": ((CUDA_OPS, "tensor_reduce._reduce", 1), (PRACTICE, "_sum_practice", 1)),
    "3.4": ((CUDA_OPS, "_tensor_matrix_multiply", 2), (PRACTICE, "_mm_practice", 2)),
    "4.1": ((CONV, "_tensor_conv1d", 0),),
    "4.2": ((CONV, "_tensor_conv2d", 0),),
    "5.1": (("kernels/reference/softmax_ladder.py", "online_statistics", 0),),
    "5.4": ((FLASH1, "forward_kernel.flash1_forward", 1),),
    "5.5": ((FLASH1, "backward_kernel.flash1_backward", 1),),
    "5.6": ((FLASH1, "forward_kernel.flash1_forward", 0),),
}
INDEXING = {"to_index", "broadcast_index", "index_to_position"}  # until module 3
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
OF_THREAD, GLOBAL = re.compile(r"threadIdx|\bgrid\(|laneid"), re.compile(r"(out|a|b)(_storage)?")
MARKER = re.compile(r"\s*# (?:TASK (\d\.\d+): |END TASK )")
#: Longer expressions are cut; functions with more statements and accesses, a loop twice, are refused.
LONGEST, MOST_STEPS = 2000, 8000
#: An array, the owner of an element, and the line.
Access = tuple[str, tuple[str, ...], int]


def faults(tree: Path, task: str) -> dict[str, str]:
    """Return what the text of each function of a task lacks, in a sentence; empty if nothing."""
    found: dict[str, str] = {}
    for file, name, arrays in KERNELS.get(task, ()):
        try:
            found[name] = fault_of((tree / file).read_text(encoding="utf-8"), name, task, arrays)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            found[name] = f"the text of {file} cannot be judged: {error}"
        found[name] = found[name].replace("{file}", Path(file).name)
    return found


def fault_of(text: str, name: str, task: str, arrays: int) -> str:
    """Return what the text of a function lacks, in a sentence; empty if nothing.

    Args:
        text: Of the file.
        name: The function and those around it, joined by dots.
        task: Only the bodies of this task are judged.
        arrays: How many shared arrays they must use; with two, they multiply from these tiles.
    """
    scope: Any = ast.parse(text)
    for part in name.split("."):
        found = [n for n in ast.walk(scope) if isinstance(n, ast.FunctionDef) and n.name == part]
        scope = found[0] if found else ast.Pass()
    lines, now = dict[int, str](), ""
    for number, line in enumerate(text.split("\n"), 1):
        marker = MARKER.match(line)
        now = marker[1] or "" if marker else now
        lines[number] = now
    own = [n for n in ast.walk(scope) if lines.get(getattr(n, "lineno", 0)) == task]
    if not own or any(isinstance(n, ast.Name) and n.id == "NotImplementedError" for n in own):
        return f"NotImplementedError: Task {task}: {name} is not written"
    if task == "5.1":  # beyond module 4
        return _not_once(own, "x")
    if task in ("3.1", "3.2", "4.1", "4.2"):  # until module 4
        fault = _not_parallel(own, name)
        if task == "3.1" and not fault:  # until module 3
            fault = _indexes_too_often(own, name)
        return fault
    walk = _Walk()
    walk.body(scope.body)
    for (array, _, before), verb, line in walk.missing:
        if lines[before] == task and lines[line]:
            place = f"above line {line}" if line >= before else f"below line {before}"
            return (
                f"line {line} of {{file}} {verb} {array}, which another thread has used in line {before}, "
                f"and no barrier is between: cuda.syncthreads() is missing {place}"
            )
    if arrays > 1 and (line := _global_in_loop(own, walk.made)):  # until module 3
        return (
            f"line {line} of {{file}} uses global memory in the innermost loop of {name}: load each "
            "element into shared memory once, multiply from there, and write once at the end"
        )
    if arrays > 1 and (line := _written_each_round(own)):  # until module 3
        return (
            f"line {line} of {{file}} writes out for each tile along k: keep the sum in a register, and "
            "write once, after the loop"
        )
    own_uses = {(array, verb) for array, verb, line in walk.used if lines[line] == task}
    used = sum((array, "writes") in own_uses for array, verb in own_uses if verb == "reads")
    if used < arrays:
        return (
            f"{name} uses {used} of {arrays} arrays in shared memory: make them with cuda.shared.array, "
            "fill them, and compute from them"
        )
    if arrays == 1 and task == "3.3" and not walk.is_combined:  # until module 3
        return (
            f"one thread of {name} folds all values: let each thread fold some, then half of the threads "
            "each fold in the value of another one, then half of those, with a barrier between the rounds"
        )
    return ""


def _loops_over(node: ast.AST, name: str) -> bool:  # until module 4
    call = node.iter if isinstance(node, ast.For) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == name


def _not_parallel(own: list[ast.AST], name: str) -> str:  # until module 4
    """Return what is wrong unless each loop that fills out is parallel, on buffers of its own."""
    parallel = [n for n in own if _loops_over(n, "prange")]
    within, in_loops = (
        {id(part) for loop in loops for part in ast.walk(loop)}
        for loops in (parallel, [n for n in own if isinstance(n, (ast.For, ast.While))])
    )
    stored = [n for n in own if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
    serial = [n for n in stored if _array(n) == "out" and id(n) in in_loops - within]
    if serial or not parallel:
        where = f"line {serial[0].lineno} of {{file}} fills out" if serial else f"{name} runs"
        return f"{where} on one core: write prange in place of range in the outermost loop"
    made = {
        target.id: n.lineno
        for n in own if isinstance(n, ast.Assign) and id(n) not in within
        and re.search(r"\b(zeros|empty|ones|full|array)(_like)?\(", ast.unparse(n.value))
        for target in n.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    used = [(_array(n), n) for n in stored]
    used += [
        (ast.unparse(n.args[-1]), n) for n in own
        if isinstance(n, ast.Call) and ast.unparse(n.func) in ("to_index", "broadcast_index")
    ]  # fmt: skip
    shared = [name for name, n in used if name in made and id(n) in within]
    if not shared:
        return ""
    return (
        f"{shared[0]} in line {made[shared[0]]} of {{file}} is shared by all threads, which overwrite each "
        "other's index: make it inside the prange loop"
    )


def _indexes_too_often(own: list[ast.AST], name: str) -> str:  # until module 3
    """Return what is wrong if aligned operands have no loop without indices, or an inner loop has some."""

    def indexing(*block: ast.AST) -> set[str]:
        parts = [n for statement in block for n in ast.walk(statement)]
        return INDEXING & {ast.unparse(n.func) for n in parts if isinstance(n, ast.Call)}

    parallel = [n for n in own if _loops_over(n, "prange")]

    def ways(block: list[ast.stmt]) -> set[bool]:
        """Return of each way through a block without indices whether it writes out."""
        found = {False}
        for n in block:
            if isinstance(n, (ast.For, ast.If, ast.While)):
                arms = ways(n.body) | (ways(n.orelse) if isinstance(n, ast.If) else set())
            else:
                arms = set() if indexing(n) else {"out[" in ast.unparse(n)}
            found = {one | other for one in found for other in arms}
        return found

    filling = [n for n in parallel if isinstance(n, ast.For) and "out[" in ast.unparse(n)]
    if filling and not name.endswith("_reduce") and not any(True in ways(n.body) for n in filling):
        return (
            f"{name} computes an index for each element: operands of one shape and with equal strides need "
            "none, so give them a prange loop of their own"
        )
    for inner in (n for loop in parallel for n in ast.walk(loop) if n is not loop):
        parts = [n for n in ast.walk(inner) if isinstance(n, (ast.For, ast.While))]
        if parts == [inner] and (found := sorted(indexing(inner))):
            return (
                f"the inner loop in line {parts[0].lineno} of {{file}} calls {found[0]}: find the first "
                "position before it, step by the stride, and call nothing but fn"
            )
    return ""


def _not_once(own: Iterable[ast.AST], name: str) -> str:  # beyond module 4
    """Return what is wrong unless a vector is read in one place, which is in a loop."""
    inside, beside = set[int](), set[int]()
    for node in own:
        parts = {id(part) for part in ast.walk(node)}
        words = ast.unparse(node)
        if re.fullmatch(rf"{name}\.(dtype|size|shape)|len\({name}\)|{name} = .*", words):
            beside |= parts
        elif isinstance(node, (ast.For, ast.While, ast.comprehension)):
            inside |= parts
    uses = [id(n) for n in own if isinstance(n, ast.Name) and n.id == name and id(n) not in beside]
    if len(uses) == 1 and uses[0] in inside:
        return ""
    return f"{name} is read in {len(uses)} places, expected one, in a loop: read each block once"


def _global_in_loop(own: Iterable[ast.AST], shared: set[str]) -> int:  # until module 3
    """Return the line where an innermost loop uses an array in global memory, except to load a tile."""
    for loop in (n for n in own if isinstance(n, (ast.For, ast.While))):
        statements = [n for part in loop.body for n in ast.walk(part) if isinstance(n, ast.stmt)]
        if any(isinstance(n, (ast.For, ast.While)) for n in statements):
            continue
        for n in statements:
            is_load = isinstance(n, ast.Assign) and _array(n.targets[0]) in shared
            is_used = any(GLOBAL.fullmatch(_array(part)) for part in ast.walk(n))
            if is_used and not is_load and not isinstance(n, ast.If):
                return n.lineno
    return 0


def _written_each_round(own: Iterable[ast.AST]) -> int:  # until module 3
    """Return the line where a loop over tiles, the innermost one with a barrier, writes to out."""
    loops = [
        n for n in own if isinstance(n, (ast.For, ast.While)) and "syncthreads" in ast.unparse(n)
    ]
    for parts in (list(ast.walk(loop)) for loop in loops):
        stored = [n for n in parts if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
        lines = [n.lineno for n in stored if _array(n) == "out"]
        if lines and not any(part in loops for part in parts[1:]):
            return lines[0]
    return 0


def _array(node: ast.AST) -> str:
    """Return the name of the array that a node is an element of; empty if it is none."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id
    return ""


class _Walk:
    """Follows statements, and collects pairs of accesses that lack a barrier between them.

    Attributes:
        missing: The access before, "reads" or "writes", and the line.
        made: Names of shared arrays.
        is_combined: Whether a thread stores in its element what it computes from that of another thread.
        used: Names of shared arrays, with "reads" or "writes" and the line.
    """

    def __init__(self) -> None:
        self.bound: dict[str, str] = {}
        self.made, self.used, self.is_combined = set[str](), set[tuple[str, str, int]](), False
        self.missing: list[tuple[Access, str, int]] = []
        self.left = MOST_STEPS
        # Since the last barrier; ``earlier`` are reads of earlier rounds of a loop.
        self.writes, self.reads, self.earlier = set[Access](), set[Access](), set[Access]()

    def body(self, statements: list[ast.stmt]) -> None:
        """Follow statements in order; a loop twice, as it may go round."""
        for statement in statements:
            self._step()
            before = set(self.writes), set(self.reads), set(self.earlier)
            if isinstance(statement, ast.If):
                self._use(statement.test)
                self.body(statement.body)
                after = self.writes, self.reads, self.earlier
                self.writes, self.reads, self.earlier = before
                self.body(statement.orelse)
                self.writes, self.reads = self.writes | after[0], self.reads | after[1]
                self.earlier = self.earlier | after[2]
            elif isinstance(statement, (ast.For, ast.While)):
                for _ in range(2):
                    head = statement.iter if isinstance(statement, ast.For) else statement.test
                    self._use(head)
                    if isinstance(statement, ast.For):
                        self._bind(statement.target, f"each({self._spelled(head)})")
                    self.body(statement.body)
                    self.earlier |= self.reads - before[1]
                # Or there is no round.
                self.writes, self.reads = self.writes | before[0], self.reads | before[1]
                self.earlier = before[2]
            else:
                self._simple(statement)

    def _simple(self, statement: ast.stmt) -> None:
        self._use(statement)
        for n in self._elements(statement):
            if isinstance(n.ctx, ast.Store):
                owners = {self._owner(part) for part in self._elements(statement)} - {()}
                value = getattr(statement, "value", statement)
                kept = f"{_array(n)}["  # in a name that is bound to it
                is_kept = kept in self._spelled(value) and kept not in ast.unparse(value)
                self.is_combined |= bool(self._owner(n)) and (len(owners) > 1 or is_kept)
                self.writes.add(self._compared(_array(n), self._owner(n), n.lineno, "writes"))
        if isinstance(statement, ast.AugAssign):  # its target is another number in each round
            thread = " threadIdx" * bool(OF_THREAD.search(self._spelled(statement.target)))
            self._bind(statement.target, f"line {statement.lineno}{thread}")
        elif isinstance(statement, ast.Assign):
            target, value = statement.targets[0], statement.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            for name, text in [(name, self._spelled(part)) for name, part in pairs]:
                self._bind(name, text)
                if "shared.array(" in text and isinstance(name, ast.Name):
                    self.made.add(name.id)

    def _use(self, node: ast.AST) -> None:
        """Note what is read, whole arrays passed to a function too; a barrier ends it."""
        elements = {id(n.value) for n in self._elements(node)}
        for n in ast.walk(node):
            if isinstance(n, ast.Call) and "syncthreads" in ast.unparse(n.func):
                self.writes, self.reads, self.earlier = set(), set(), set()
            elif isinstance(n, ast.Name) and n.id in self.made and id(n) not in elements:
                self.reads.add(self._compared(n.id, (ast.unparse(node),), n.lineno, "reads"))
        for n in self._elements(node):
            if ast.unparse(n.slice) == "0":  # thread 0 has it
                self.used.add((_array(n), "reads", n.lineno))
            elif not isinstance(n.ctx, ast.Store):
                self.reads.add(self._compared(_array(n), self._owner(n), n.lineno, "reads"))

    def _elements(self, node: ast.AST) -> list[ast.Subscript]:
        parts = [n for n in ast.walk(node) if isinstance(n, ast.Subscript)]
        return [n for n in parts if _array(n) in self.made]

    def _compared(self, array: str, owner: tuple[str, ...], line: int, verb: str) -> Access:
        """Compare an access with those since the last barrier, and return it."""
        self._step()
        self.used.add((array, verb, line))
        others = sorted(self.writes if verb == "reads" else self.earlier)
        pairs = [other for other in others if other[0] == array and other[1] != owner]
        self.missing += [(other, verb, line) for other in pairs]
        return array, owner, line

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError("its loops are too long, or nested too deep")

    def _bind(self, target: ast.AST, text: str) -> None:
        for n in ast.walk(target):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                self.bound[n.id] = f"({text})"

    def _owner(self, element: Any) -> tuple[str, ...]:
        parts = element.slice.elts if isinstance(element.slice, ast.Tuple) else [element.slice]
        return tuple(text for part in parts if OF_THREAD.search(text := self._spelled(part)))

    def _spelled(self, node: ast.AST) -> str:
        """Return an expression with what its names stand for in their place."""
        text = NAME.sub(lambda m: self.bound.get(m[0], m[0]), ast.unparse(node))
        return text[:LONGEST]
