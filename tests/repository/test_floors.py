"""The house: arrows point down only, and each thing that must exist once exists once."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("kernels", "minitorch", "project")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)

# From the ground up; a file imports files of lower floors, or earlier ones of its own floor.
MINITORCH_FLOORS = [
    ["entrance", "doctor_probes", "doctor_rules", "doctor", "__main__"],
    ["operators", "module", "datasets"],
    ["autodiff", "anomaly", "scalar_functions", "scalar", "scalar_modules", "testing"],
    [
        "elements",
        "tensor_data",
        "matmul_precision",
        "widening",
        "plain_math",
        "tensor_ops",
        "fast_loops",
        "fast_ops",
        "cuda_kernels",
        "cuda_loops",
        "cuda_ops",
        "cuda_kernel_ops",
    ],
    [
        "dropout_seeds",
        "function",
        "shape_functions",
        "attention_functions",
        "tensor_functions",
        "fused_functions",
        "tensor_operators",
        "tensor_lending",
        "tensor",
        "factories",
        "recompute",
        "gradient_check",
        "fast_conv",
        "cuda_conv",
    ],
    [
        "attention_scores",
        "nn",
        "linear_functions",
        "head_functions",
        "modules_basic",
        "modules",
        "residual_functions",
        "optim",
        "adamw",
        "graph_step",
    ],
    [
        "kv_cache",
        "decoding",
        "transformer_layers",
        "transformer",
        "modules_transfomer",
        "saved_models",
        "training_state",
        "published",
        "compat",
    ],
]
#: The page that draws the floors, from the top down.
DRAWN = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
ORDER = {name: i for i, name in enumerate(name for floor in MINITORCH_FLOORS for name in floor)}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports when it runs (not for its types)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    names: set[str] = set()
    package = (
        module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    )
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.rsplit(".", node.level - 1)[0]
                base = ".".join(filter(None, [parent, base]))
            names |= {f"{base}.{alias.name}" for alias in node.names} | {base}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_kernels_know_nothing_of_tensors(path: Path) -> None:
    if path.is_relative_to(ROOT / "kernels"):
        assert not {n for n in imported(path) if n.split(".")[0] in ("minitorch", "project")}


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_nothing_imports_the_top_floor(path: Path) -> None:
    if not path.is_relative_to(ROOT / "project"):
        assert not {n for n in imported(path) if n.split(".")[0] in ("project", "tests", "docs")}


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_minitorch_imports_lower_floors_only(path: Path) -> None:
    # A folder has one place, which is that of each file in it.
    package, _, rest = module_name(path).partition(".")
    own = rest.split(".")[0]
    if package != "minitorch" or not own:
        return
    assert own in ORDER, f"{own} has no floor yet: give it one in this test"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "minitorch" and len(parts) > 1 and parts[1] in ORDER and parts[1] != own:
            assert ORDER[parts[1]] < ORDER[own], f"{own} imports {parts[1]}, above it"


def test_architecture_draws_these_floors() -> None:
    ours, *_ = re.split(r"^kernels", DRAWN, flags=re.MULTILINE)
    names = re.findall(r"\w+", re.sub(r"modules? \d", "", ours))
    drawn = [name for name in names if name in ORDER]
    assert drawn == [name for floor in reversed(MINITORCH_FLOORS) for name in floor]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_only_targets_imports_numba_cuda(path: Path) -> None:
    uses = {n for n in imported(path) if n.startswith(("numba.cuda", "cuda."))}
    assert not uses or module_name(path) == "kernels.runtime.targets"


def test_imports_run_in_no_circle() -> None:
    # A package's own file imports what lies in it; that its parts name the package is no import of it.
    modules = {module_name(path) for path in SOURCES if path.name != "__init__.py"}
    graph = {module_name(path): imported(path) & modules for path in SOURCES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_there_are_no_star_imports(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    stars = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    assert not stars


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_no_import_hides_in_a_function_but_that_of_an_extra(path: Path) -> None:
    extras = {"matplotlib", "torch", "streamlit", "plotly", "networkx", "pydoc_data", "sklearn"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    names = {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names = {(node.module or "").split(".")[0]}
                else:
                    continue
                assert names <= extras, f"{function.name} imports {names}"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450
