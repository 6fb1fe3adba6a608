"""The house: imports point down only, as docs/architecture.md declares, and run in no circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from typing import Any

from ..support.rooms import ROOT, declared, imported_names, imports, room_of, sources

#: Modules of optional extras, which a function may import.
EXTRAS = {
    "matplotlib",
    "mpi4py",
    "nccl",
    "tokenizers",
    "torch",
    "transformers",
    "streamlit",
    "plotly",
    "networkx",
    "pydoc_data",
    "IPython",
    "sklearn",
}
#: What minitorch may import of kernels.
OPEN_ROOMS = {"interop", "common", "runtime", "problem", "scores"}
OPEN_FILES = {
    "kernels/__init__.py", "kernels/launch.py", "kernels/varlen.py", "kernels/array_call.py",
    "kernels/bound_calls.py", "kernels/operand_types.py",
    "kernels/cpu/backend.py", "kernels/cuda/backend.py",
    # Of minitorch/accelerated alone.
    "kernels/cpu/layers/decoding_step.py", "kernels/cpu/layers/fused.py", "kernels/cuda/layers/fused.py",
    "kernels/cuda/matmul/cuda_cores.py", "kernels/cuda/matmul/dispatch.py",
}  # fmt: skip


def nodes(path: str, *kinds: type[ast.AST]) -> list[Any]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_every_file_has_a_room_and_every_room_files() -> None:
    rooms = declared()
    found = {path: room_of(path, rooms) for path in sources()}
    homeless = [
        path for path, room in found.items()
        if room is None and (ROOT / path).read_text(encoding="utf-8").strip()
    ]  # fmt: skip
    assert not homeless, f"not in the table of docs/architecture.md: {homeless}"
    empty = [room.folder for room in rooms if room not in found.values()]
    assert not empty, f"docs/architecture.md has rooms without files: {empty}"


def test_imports_point_down() -> None:
    rooms, wrong = declared(), []
    for path, files in imports().items():
        own = room_of(path, rooms)
        for other in files:
            room = room_of(other, rooms)
            if own and room and room.height > own.height:
                wrong.append(f"{path} imports {other}, and {room.folder} lies above {own.folder}")
    assert not wrong, "\n".join(wrong)


def test_imports_run_in_no_circle() -> None:
    # A package's own file imports what lies in it; that its parts name the package is no import of it.
    graph = {
        path: {other for other in files if not other.endswith("__init__.py")}
        for path, files in imports().items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_minitorch_enters_kernels_by_its_doors() -> None:
    wrong = [
        f"{path} imports {other}"
        for path, files in imports().items()
        if path.startswith("minitorch/")
        for other in files
        if other.startswith("kernels/") and other not in OPEN_FILES
        if other.split("/")[1] not in OPEN_ROOMS
    ]
    assert not wrong, "\n".join(wrong)


def test_module_1_imports_modules_0_and_1_only() -> None:
    graph, seen = imports(), set()
    waiting = ["minitorch/scalar.py"]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += graph[path]
    rooms = declared()
    folders = {room.folder for path in seen if (room := room_of(path, rooms))}
    assert folders == {"minitorch/scalars"}, sorted(seen)


def test_only_targets_imports_numba_cuda() -> None:
    users = {
        path for path in sources() for name in imported_names(path)
        if name.startswith(("numba.cuda", "cuda."))
    }  # fmt: skip
    assert users == {"kernels/runtime/targets.py"}


def test_only_the_room_of_pytorch_imports_it() -> None:
    users = {
        path for path in sources() for name in imported_names(path)
        if name.split(".")[0] in ("torch", "transformers") and not path.startswith("project/")
    }  # fmt: skip
    assert {path.rpartition("/")[0] for path in users} == {"kernels/interop/torch"}


def test_there_are_no_star_imports() -> None:
    assert not [path for path in sources() for name in imported_names(path) if name.endswith("*")]


def test_no_import_hides_in_a_function_but_that_of_an_extra() -> None:
    hidden = []
    for path in sources():
        for function in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    names = {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names = {(node.module or "").split(".")[0]}
                else:
                    continue
                if not names <= EXTRAS:
                    hidden.append(f"{path}: {function.name} imports {names}")
    assert not hidden, "\n".join(hidden)


def test_files_stay_short() -> None:
    lengths = {
        path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources()
    }
    assert not {path: length for path, length in lengths.items() if length > 450}
