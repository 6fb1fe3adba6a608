"""The house: imports point down only, as docs/architecture.md declares, and run in no circle."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest

from ..support import quick
from ..support.packages import ROOT, declared, imported_names, imports, package_of, sources

#: What minitorch may import of kernels.
OPEN_PACKAGES = {"interop", "common", "runtime", "problem", "scores"}
OPEN_FILES = {
    "kernels/__init__.py", "kernels/launch.py", "kernels/varlen.py", "kernels/array_call.py",
    "kernels/bound_calls.py", "kernels/operand_types.py",
    "kernels/cpu/backend.py", "kernels/cuda/backend.py",
    # Of minitorch/accelerated alone.
    "kernels/cpu/layers/decoding_step.py", "kernels/cpu/layers/fused.py", "kernels/cuda/layers/fused.py",
    "kernels/cuda/matmul/cuda_cores.py", "kernels/cuda/matmul/dispatch.py",
}  # fmt: skip


def test_every_file_has_a_package_and_every_package_has_files() -> None:
    packages = declared()
    found = {path: package_of(path, packages) for path in sources()}
    homeless = [
        path for path, package in found.items()
        if package is None and (ROOT / path).read_text(encoding="utf-8").strip()
    ]  # fmt: skip
    assert not homeless, f"not in the table of docs/architecture.md: {homeless}"
    empty = [one.folder for one in packages if one not in found.values()]
    assert not empty, f"docs/architecture.md has packages without files: {empty}"


def test_imports_point_down() -> None:
    packages, wrong = declared(), []
    for path, files in imports().items():
        own = package_of(path, packages)
        for other in files:
            package = package_of(other, packages)
            if own and package and package.height > own.height:
                wrong.append(
                    f"{path} imports {other}, and {package.folder} lies above {own.folder}"
                )
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
        if other.split("/")[1] not in OPEN_PACKAGES
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("imported", "packages"),
    [
        (("numba.cuda", "cuda"), {"kernels/runtime"}),
        (("numba.core", "numba.np"), {"kernels/runtime", "kernels/cpu/matmul"}),
        (("llvmlite",), {"kernels/cuda/ptx", "kernels/cpu/matmul", "kernels/cpu/runtime"}),
        (("torch", "transformers"), {"kernels/interop/torch"}),
    ],
)
def test_few_packages_import_a_compiler_or_torch(
    imported: tuple[str, ...], packages: set[str]
) -> None:
    users = {
        path.rpartition("/")[0] for path in sources() for name in imported_names(path)
        if f"{name}.".startswith(tuple(f"{one}." for one in imported)) and path[:8] != "project/"
    }  # fmt: skip
    assert users == packages


def test_make_quick_finds_the_tests_of_a_changed_file() -> None:
    assert "tests/minitorch/test_optim.py" in quick.tests_of("minitorch/optim.py", declared())
