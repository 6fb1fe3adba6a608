"""Change drawn source lines, one at a time, and list the changes that no test catches.

python project/measure.py mutations                  300 changes, about an hour on two cores
python project/measure.py mutations --at HEAD~20     of another commit, with its tests
python project/measure.py mutations --resume         continue the last run
python project/measure.py mutations --count 20 --only kernels/cpu --tests tests/kernels

A change is another operator, constant, comparison or index in minitorch or the kernels, or a statement
less.  The lines whose hashes with the seed are least are drawn, so that two commits have the changes of
their common lines in common.  First, the quick tests run in a copy of the tree, on the host and on the
emulated GPU, and a plug-in records which functions each of them calls.  Then each change runs in a copy
of its own through the tests of its function, of its file and of the files that import it, beginning with
the tests that call the fewest functions.  A change after which the tests hang counts as caught.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.kit import ROOT, Case, Measurement, Record, Run, markdown
from bench.processes import run_for

from reliability.called_functions import BUDGET, FLOORS

FOLDER = ROOT / "build" / "mutations"
#: How tests run: on the host, and on the emulated GPU.
MODES = {"host": {"MINITORCH_EMULATE": "0"}, "emulated": {"MINITORCH_EMULATE": "1"}}
MARKS = {"host": "not slow and not fuzz", "emulated": "emulated and not slow"}
#: Seconds that tests may take beyond their budget, to start and to compile; after them they hang.
PATIENCE = 120
#: Tests that compile kernels for minutes, and the number of processes that share those of a file.
COMPILING, PARTS = "tests/structure/compile_only", 8
#: Tests of a change at most.
MOST_TESTS = 200
OUTCOMES = ("caught", "survived", "not tested")
OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
#: Calls whose arguments are texts, and functions that make one.
TEXTS = ("warn", "print", "TypeVar"), ("__repr__", "__str__", "__format__")


class Mutation(NamedTuple):
    """One change: bytes of a file, and what replaces them."""

    file: str
    line: int
    kind: str
    first: int
    last: int
    text: str


def _changed(node: Any) -> Iterator[tuple[str, ast.AST]]:
    """Yield what may replace a node, and the kind of the change."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OTHER:
        yield "operator", type(node)(**{**vars(node), "op": OTHER[type(node.op)]()})
    elif isinstance(node, ast.BoolOp):
        yield "operator", ast.BoolOp(OTHER[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp):
        yield "operator", node.operand
    elif isinstance(node, ast.Compare):
        yield "comparison", ast.Compare(node.left, [OTHER[type(node.ops[0])](), *node.ops[1:]],
                                        node.comparators)  # fmt: skip
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        if isinstance(node.value, bool):
            yield "constant", ast.Constant(not node.value)
        else:
            yield "constant", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        swapped = ast.Tuple(node.slice.elts[::-1], ast.Load())
        if ast.dump(swapped) != ast.dump(node.slice):
            yield "index", ast.Subscript(node.value, swapped, node.ctx)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and node.slice.upper:
        whole = ast.Slice(node.slice.lower, None, node.slice.step)
        yield "index", ast.Subscript(node.value, whole, node.ctx)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_write = isinstance(node, ast.Assign) and not isinstance(
        node.targets[0], (ast.Name, ast.Tuple)
    )
    if is_call or is_write or isinstance(node, (ast.AugAssign, ast.Raise)):
        yield "dropped statement", ast.Pass()


def _parts(node: Any) -> Iterator[ast.AST]:
    """Yield the nodes in a node that may be changed: no annotations, decorators or texts."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TEXTS[0]:
        return
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in TEXTS[1]:
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            children = value if isinstance(value, list) else [value]
            yield from (child for child in children if isinstance(child, ast.AST))


def mutations_of(file: str, source: bytes) -> list[Mutation]:
    """Return every change of a file."""
    starts = [0]
    found: list[Mutation] = []
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node: Any, inside: bool) -> None:
        for kind, new in _changed(node):
            if not inside and isinstance(getattr(node, "op", None), ast.BitOr):
                continue  # of types
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
            found.append(Mutation(file, node.lineno, kind, first, last, text))
        for part in _parts(node):
            visit(part, inside or isinstance(node, ast.FunctionDef))

    visit(ast.parse(source), False)
    return found


def drawn(tree: Path, only: list[str], count: int, seed: int) -> list[Mutation]:
    """Return changes of so many lines, one of each."""
    lines: dict[str, list[Mutation]] = defaultdict(list)
    for file in sorted(path for floor in FLOORS for path in tree.glob(f"{floor}/**/*.py")):
        name = file.relative_to(tree).as_posix()
        if name.startswith(tuple(only)):
            source, again = file.read_bytes(), Counter[str]()
            texts, number = source.decode().splitlines(), 0
            for one in sorted(mutations_of(name, source), key=lambda one: one.line):
                text = texts[one.line - 1].strip()
                again[text] += one.line != number
                number = one.line
                lines[f"{seed} {name} {again[text]} {text}"].append(one)
    hashes = {hashlib.sha256(key.encode()).hexdigest(): key for key in lines}
    return [
        lines[hashes[one]][int(one, 16) % len(lines[hashes[one]])] for one in sorted(hashes)[:count]
    ]


def run_tests(
    tree: Path, mode: str, arguments: list[str], seconds: float, **own: str
) -> tuple[int | None, str]:
    """Return the exit code of tests, None if they are killed after these seconds, and what they print."""
    path = [str(tree), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {
        "PYTHONPATH": os.pathsep.join(path), "CI": "true", "MINITORCH_SHRINK": "0",
        "MINITORCH_EXAMPLES": "10", "NUMBA_NUM_THREADS": "2", **MODES[mode], **own,
    }  # fmt: skip
    plugins = ["-p", "no:cacheprovider", "-p", "called_functions"]
    return run_for(
        [sys.executable, "-m", "pytest", "-q", *plugins, *arguments], seconds, tree, **env
    )


def touched(tree: Path, only: list[str], workers: int) -> dict[str, dict[str, list[str]]]:
    """Return by mode and test the functions that each test calls, as ``kernels/launch.py:12``.

    What a file of tests calls is kept beside the tree, so that the next run goes on from there.
    """
    every = ((file, file.relative_to(tree).as_posix()) for file in tree.glob("tests/**/test_*.py"))
    found = sorted((-file.stat().st_size, name) for file, name in every)
    files = [name for _, name in found if name.startswith(tuple(only))]
    calls: dict[str, dict[str, list[str]]] = {mode: {} for mode in MODES}

    def one(job: tuple[str, str, int, int]) -> None:
        mode, file, number, parts = job
        record = tree.parent / "calls" / f"{mode}.{number}.{file.replace('/', '.')}.jsonl"
        part = record.with_suffix(".part")
        if not record.exists():
            part.parent.mkdir(exist_ok=True)
            part.write_text("", encoding="utf-8")
            own = {"MUTATIONS_RECORD": str(part), "MINITORCH_EXAMPLES": "3",
                   "MUTATIONS_PART": f"{number}/{parts}"}  # fmt: skip
            code, output = run_tests(tree, mode, ["-m", MARKS[mode], file], 600, **own)
            if code not in (0, 5):
                last = output.strip().splitlines()[-1:] or ["killed"]
                print(f"{mode}: {file} fails unchanged: {last[0][:100]}", flush=True)
            part.rename(record)
        calls[mode] |= dict(map(json.loads, record.read_text(encoding="utf-8").splitlines()))

    with ThreadPoolExecutor(workers) as pool:
        jobs = [(file, PARTS if file.startswith(COMPILING) else 1) for file in files]
        jobs.sort(key=lambda job: -job[1])  # what takes longest begins first
        list(
            pool.map(
                one, [(mode, file, i, n) for mode in MODES for file, n in jobs for i in range(n)]
            )
        )
    return calls


class Tests:
    """Which tests may catch a change."""

    def __init__(self, tree: Path, calls: dict[str, dict[str, list[str]]]):
        self.by_file: dict[str, list[tuple[int, str, str, set[int]]]] = defaultdict(list)
        for mode, tests in calls.items():
            for test, places in tests.items():
                lines: dict[str, set[int]] = defaultdict(set)
                for file, _, line in (place.rpartition(":") for place in places):
                    lines[file].add(int(line))
                for file, those in lines.items():
                    self.by_file[file].append((len(places), mode, test, those))
        self.scopes: dict[str, list[tuple[int, int]]] = {}
        self.importers: dict[str, set[str]] = defaultdict(set)
        for path in (path for floor in FLOORS for path in tree.glob(f"{floor}/**/*.py")):
            file = path.relative_to(tree).as_posix()
            self._read(tree, file, ast.parse(path.read_bytes()))

    def _read(self, tree: Path, file: str, parsed: ast.Module) -> None:
        """Note the functions of a file, and whom it imports."""
        self.scopes[file] = []
        for node in ast.walk(parsed):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                self.scopes[file].append((first, node.end_lineno or node.lineno))
            elif isinstance(node, ast.ImportFrom):
                base = file.split("/")[: -node.level] if node.level else []
                module = "/".join([*base, *(node.module or "").split(".")]).strip("/")
                for name in (module, *(f"{module}/{alias.name}" for alias in node.names)):
                    if (tree / f"{name}.py").exists():
                        self.importers[f"{name}.py"].add(file)

    def of(self, file: str, line: int) -> list[tuple[str, str]]:
        """Return modes and tests: of the innermost function that has any, of those around it, and so on."""
        scopes = [one for one in self.scopes[file] if one[0] <= line <= one[1]]
        found: dict[tuple[str, str], None] = {}
        for scope in sorted(scopes, key=lambda one: one[1] - one[0]):
            found.update(dict.fromkeys(self._ordered(file, *scope)))
        files, known = [file], {file}
        while files and len(found) < MOST_TESTS:
            for name in files:
                found.update(dict.fromkeys(self._ordered(name, 0, 10**9)))
            files = sorted({one for name in files for one in self.importers[name]} - known)
            known.update(files)
        return [*found][:MOST_TESTS]

    def _ordered(self, file: str, first: int, last: int) -> list[tuple[str, str]]:
        """Return the tests that call functions that begin there: one case of each test, then another."""
        cases: Counter[str] = Counter()
        found = []
        for breadth, mode, test, lines in sorted(self.by_file[file], key=lambda one: one[:3]):
            if any(first <= line <= last for line in lines):
                cases[test.split("[")[0]] += 1
                found.append((cases[test.split("[")[0]], breadth, mode, test))
        return [(mode, test) for _, _, mode, test in sorted(found)]


def caught_by(
    one: Mutation, tree: Path, tests: list[tuple[str, str]], seconds: float, **environment: str
) -> str:
    """Return which test, of those of a mode, fails after a change, or ''."""
    with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
        own = Path(folder) / "tree"
        shutil.copytree(tree, own, copy_function=os.link)
        source = (own / one.file).read_bytes()
        (own / one.file).unlink()
        changed = source[: one.first] + one.text.encode() + source[one.last :]
        (own / one.file).write_bytes(changed)
        modes = [*dict.fromkeys(mode for mode, _ in tests)]
        for mode in modes:
            share = seconds / len(modes)
            arguments = ["-x", *(test for its, test in tests if its == mode)]
            given = environment | {"MUTATIONS_SECONDS": str(share)}
            code, output = run_tests(own, mode, arguments, share + PATIENCE, **given)
            lines = output.splitlines()
            failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
            if code in (0, 5) or (code == 2 and BUDGET in output and not failed):
                continue
            if code is None:
                return f"all: the tests take longer than {share + PATIENCE:.0f} s"
            return failed[0].split(" ", 1)[1].split(" - ")[0] if failed else f"exit code {code}"
    return ""


def copy_of_tree(at: str, tree: Path) -> None:
    """Copy a commit, or the working tree of a folder."""
    if Path(at).is_dir():
        left_out = shutil.ignore_patterns(".git", ".venv*", "build", "runs", ".hypothesis")
        shutil.copytree(at, tree, ignore=left_out)
    else:
        tree.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", at], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)


def table(record: Record) -> str:
    """Return how many changes of each package were caught, and those that survived."""
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for row in record["rows"]:
        for name in (row["file"].rpartition("/")[0], "all"):
            packages[name][row["outcome"]] += 1
    lines = [
        [name, str(sum(found.values())), *(str(found[outcome]) for outcome in OUTCOMES)]
        for name, found in sorted(packages.items(), key=lambda item: (item[0] == "all", item[0]))
    ]
    survivors = (
        f"- {row['file']}:{row['line']}: {row['kind']}: {row['before']} → {row['after']}"
        for row in record["rows"] if row["outcome"] != OUTCOMES[0]
    )  # fmt: skip
    return "\n".join([markdown(["package", "changes", *OUTCOMES], lines), "", *survivors])


def cases(run: Run) -> Iterator[Case]:
    tree, workers = FOLDER / "tree", run.workers or os.cpu_count() or 1
    if not run.resumed:
        shutil.rmtree(FOLDER, ignore_errors=True)
        copy_of_tree(run.at or str(ROOT), tree)
    run.note(at=run.at, seed=run.seed)
    tests, waiting = Tests(tree, touched(tree, run.tests, workers)), list[Any]()

    def test(change: Mutation) -> Record:
        start, own = time.perf_counter(), tests.of(change.file, change.line)
        failed = caught_by(change, tree, own, run.seconds) if own else ""
        took = round(time.perf_counter() - start, 1)
        outcome = OUTCOMES[0 if failed else 1 if own else 2]
        return {"outcome": outcome, "test": failed, "seconds": took}

    with ThreadPoolExecutor(workers) as pool:
        for one in drawn(tree, run.only, run.count, run.seed):
            before = (tree / one.file).read_bytes()[one.first : one.last].decode()
            key = {
                "file": one.file,
                "line": one.line,
                "kind": one.kind,
                "before": before,
                "after": one.text,
            }
            if not any(key.items() <= row.items() for row in run.rows):
                waiting.append((key, pool.submit(test, one)))
        try:
            yield from ((key, found.result) for key, found in waiting)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


MEASUREMENT = Measurement(
    "mutations", "Which changes of source lines does no test catch?", cases,
    {"cpu": {"normal": {"count": 300, "seed": 0, "workers": 0, "seconds": 20.0, "only": FLOORS,
                        "tests": ("tests",), "at": ""},
             "quick": {"count": 2, "only": ("minitorch/module.py",),
                       "tests": ("tests/course/test_module.py",)}}},
    table=table, minutes={"cpu": 60}, paths=("kernels", "minitorch", "tests"), folder="reliability",
)  # fmt: skip
