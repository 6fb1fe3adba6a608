"""The doctor answers wherever Python runs, and each thing that is wrong comes with what mends it."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch.doctor.command import conflicts, ranges, report
from minitorch.doctor.entrance import is_ours, naming_the_doctor
from minitorch.doctor.rules import Finding, diagnose, is_within, numbers

ROOT = Path(minitorch.__file__).parent.parent
COMMAND = ["-m", "minitorch", "doctor"]


def python(*arguments: str, path: tuple[Path, ...] = (), **variables: str) -> Any:
    """Run Python outside of the checkout, with folders before everything else that it imports from."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("NUMBA_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*path, ROOT)))
    return subprocess.run(
        [sys.executable, *arguments], env={**environment, **variables}, cwd=Path(sys.prefix),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def package(folder: Path, name: str, source: str) -> Path:
    """Write a package and return the folder from which it can be imported."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source, encoding="utf-8")
    return folder


# -- whole runs -----------------------------------------------------------------------------------


def test_a_healthy_environment_has_no_problem() -> None:
    done = python(*COMMAND, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0, answer["findings"]
    assert not any(finding["is_problem"] for finding in answer["findings"])
    facts = answer["facts"]
    assert Path(facts["library"]["file"]).samefile(minitorch.__file__)
    said = report(facts, [])
    for name in ("Python", "numba.cuda", "emulated GPU", "GPU", "threading layer", "cache"):
        assert re.search(rf"^{name} +\S", said, re.MULTILINE), name


#: What a broken NumPy does when it is imported → what is said of it.
BROKEN = {
    "raise ImportError('broken on purpose')": "ImportError: broken on purpose",
    "raise ValueError('numpy.dtype size changed')": "ValueError: numpy.dtype size changed",
    "raise SystemExit(3)": "SystemExit: 3",
    "import os; os._exit(7)": "code 7",
    "import os; os.abort()": "crashed (SIGABRT)",
    "import time; time.sleep(60)": "no answer after 3 seconds",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", BROKEN)
def test_a_numpy_that_cannot_be_imported_is_reported_and_not_fatal(
    source: str, tmp_path: Path
) -> None:
    done = python(*COMMAND, "--seconds", "3", path=(package(tmp_path, "numpy", source),))
    assert done.returncode == 1, done.stderr
    assert BROKEN[source] in done.stdout
    assert f"rename or move {tmp_path / 'numpy'}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_it_runs_where_nothing_is_installed() -> None:
    done = python("-S", *COMMAND)
    assert done.returncode == 1, done.stderr
    assert "not installed: numpy, numba" in done.stdout
    assert f'python -m pip install "numpy{ranges()["numpy"]}"' in done.stdout


def test_a_numba_without_cuda_and_another_kernels_are_named(tmp_path: Path) -> None:
    folder = package(tmp_path, "numba", "__version__ = '0.68.1'")
    package(tmp_path, "kernels", "def get_kernel(name): ...")
    done = python(*COMMAND, path=(folder,))
    assert done.returncode == 1
    assert "in place of the package numba" in done.stdout
    assert "in place of the project's package kernels" in done.stdout
    for name in ("numba", "kernels"):
        assert f"rename or move {tmp_path / name}" in done.stdout


def test_a_library_that_cannot_be_imported_names_the_doctor(tmp_path: Path) -> None:
    folder = package(tmp_path, "numpy", "raise RuntimeError('no such luck')")
    done = python("-c", "import minitorch", path=(folder,))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: minitorch cannot be imported")
    assert "RuntimeError: no such luck" in last
    assert "python -m minitorch doctor" in last


@pytest.mark.parametrize("script", ["script", "kernels"])
def test_a_file_in_place_of_our_kernels_is_named(script: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text("print('it runs')\nimport minitorch\nminitorch.tensor([1.0])", encoding="utf-8")
    (tmp_path / "script.py").write_text("import minitorch", encoding="utf-8")
    done = python(str(tmp_path / f"{script}.py"))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: minitorch needs its own package kernels"), done.stderr
    assert f"Rename or move {file}" in last and "python -m minitorch doctor" in last
    assert done.stdout.count("it runs") == (script == "kernels"), "no import runs the file"


# -- the parts --------------------------------------------------------------------------------------


def test_an_error_of_our_own_code_stays_what_it_is() -> None:
    file = str(ROOT / "minitorch" / "operators.py")
    for source, kind in (("1 / 0", ZeroDivisionError), ("def f(:", SyntaxError)):
        with pytest.raises(kind), naming_the_doctor():
            exec(compile(source, file, "exec"))
    with pytest.raises(ImportError, match="doctor") as raised, naming_the_doctor():
        json.loads("{")
    assert isinstance(raised.value.__cause__, json.JSONDecodeError)
    assert is_ours(ImportError("no such name", name="minitorch.operators"))
    assert not is_ours(ModuleNotFoundError("gone", name="a_package_that_is_not_there"))


def test_versions_that_exclude_one_another_are_found_by_their_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version, needs in (
        ("numba", "0.61.2", "numpy<2.3,>=1.24"),
        ("scipy", "1.17.1", "numpy<2.7,>=1.26.4"),
        ("numpy", "2.4.6", "scipy<1; extra == 'old'"),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {needs}\n"
        (folder / "METADATA").write_text(about, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    (one,) = conflicts(["numba", "scipy", "numpy", "not-there"])
    assert (one["name"], one["other"], one["bounds"]) == ("numba", "numpy", "<2.3,>=1.24")


releases = st.lists(st.integers(0, 30), min_size=1, max_size=3).map(lambda x: ".".join(map(str, x)))


@given(releases, releases, releases)
def test_ranges_are_read_as_pip_reads_them(version: str, low: str, high: str) -> None:
    def compared(a: str, b: str) -> int:
        left, right = ((*numbers(each), 0, 0, 0)[:3] for each in (a, b))
        return (left > right) - (left < right)

    expected = compared(version, low) >= 0 and compared(version, high) < 0
    assert is_within(version, f">={low},<{high}") == expected
    assert is_within(version, f"<{high}, >={low}") == expected


# -- machines that are not here -----------------------------------------------------------------------

#: A machine with a GPU on which everything works.
WELL: dict[str, Any] = {
    "python": {"version": "3.11.7", "executable": "/v/bin/python", "platform": "Linux x86_64"},
    "minitorch": "/p/minitorch",
    "ranges": ranges(),
    "installed": {"numba-cuda": "0.30.4"},
    "environment": {},
    "kernels": {
        "file": "/p/kernels/__init__.py", "is_ours": True, "other_installed": None, "root": "/p",
        "expected": "/p/kernels/__init__.py",
    },
    "cache": {"folder": "/p/kernels/__pycache__", "why_not": None},
    "packages": {
        name: {"installed": version, "version": version, "file": f"/s/{name}.py", "shadowed": False}
        for name, version in {
            "numpy": "2.4.6", "numba": "0.68.1", "ml_dtypes": "0.6.0", "scipy": "1.17.1",
            "safetensors": "0.8.0", "threadpoolctl": "3.8.0", "tqdm": "4.70.1",
        }.items()
    },
    "cuda": {"file": "/s/numba_cuda/numba/cuda/__init__.py", "emulated": False},
    "launch": {"gpu": "NVIDIA H200, compute capability 9.0"},
    "parallel": {"layer": "omp", "threads": 2},
    "library": {"file": "/p/minitorch/__init__.py", "seconds": 1.0, "rungs": ["flash2", "naive"]},
}  # fmt: skip

Change = Callable[[dict[str, Any]], Any]


def _set(*path: str, **values: Any) -> Change:
    def change(facts: dict[str, Any]) -> None:
        for key in path:
            facts = facts[key]
        facts.update(values)

    return change


def _both(*changes: Change) -> Change:
    return lambda facts: [change(facts) for change in changes]


NO_NUMBA_CUDA = _both(_set("cuda", file="/s/numba/cuda/__init__.py"), _set(installed={}))
NO_GPU = _set(launch={"gpu": None, "reason": "no libcuda.so.1"})
NUMBAS = "/s/numba_cuda/numba/cuda/__init__.py"
NO_LAYER = _set("parallel", error="ValueError: No threading layer could be loaded")
#: What is wrong, what is said, and what to do about it.
SICK: list[tuple[Change, str, str]] = [
    (_set("python", version="3.9.18"), "Python 3.9.18", "PYTHON=python3.12"),
    (_set("packages", "numpy", installed="2.6.0"), "numpy is 2.6.0", '"numpy>=2.1.2,<2.6"'),
    (_set("packages", "tqdm", installed=None, file=None), "not installed: tqdm", '"tqdm>=4.60,<5"'),
    (_set("packages", "numba", error="OSError: libllvmlite.so"),
     "numba 0.68.1 cannot be imported: OSError", '--force-reinstall "numba>=0.61,<0.69"'),
    (_set("packages", "numba", installed="0.69.0"), "numba is 0.69.0", '"numba>=0.61,<0.69"'),
    (_set("packages", "numba", installed="0.61.0", error="ImportError: Numba needs NumPy 2.1 or less"),
     "numba 0.61.0 cannot be imported: ImportError: Numba needs NumPy 2.1", '--upgrade --force-reinstall'),
    (_set(conflicts=[{"name": "numba", "version": "0.61.2", "other": "numpy", "bounds": ">=1.24,<2.3",
                      "installed": "2.4.6"}]),
     "numba 0.61.2 needs numpy>=1.24,<2.3, and numpy is 2.4.6", '--upgrade "numba>=0.61,<0.69" "numpy>='),
    (_set("packages", "numba", installed=None, file=None), "not installed: numba", '"numba>=0.61'),
    (_set(installed={"numba-cuda": "0.31.0"}), "numba-cuda is 0.31.0", '"numba-cuda[cu13]>=0.30.4,<0.31"'),
    (_set("python", version="3.16.0"), "Python 3.16.0; needed is >=3.10,<3.16", "PYTHON=python3.12"),
    (_set("launch", error="CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
     "its driver is older than the CUDA toolkit: CUDA_ERROR_UNSUPPORTED", '"numba-cuda[cu12]'),
    (_set(cuda={"file": NUMBAS, "emulated": False, "compile_error": "NvvmSupportError: libNVVM"}),
     "NVVM, their compiler, was not found", '"numba-cuda[cu13]'),
    (_set(cuda={"error": "ModuleNotFoundError: No module named 'numba.cuda'"}, installed={}),
     "numba.cuda cannot be imported", '--force-reinstall "numba>=0.61,<0.69"'),
    (_set("launch", error="the process crashed"), "on the GPU: the process crashed", "nvidia-smi"),
    (_set("launch", error="no answer after 60 seconds"), "on the GPU: no answer", "--seconds 600"),
    (_set("kernels", is_ours=False, file="/s/kernels/__init__.py", other_installed="0.5.0"),
     "Hugging Face's package kernels 0.5.0 is imported in place of ours", "pip uninstall kernels"),
    (_set("kernels", other_installed="0.5.0"), "kernels 0.5.0 is installed", "pip uninstall kernels"),
    (_set("kernels", is_ours=False, file="/x/kernels.py"), "/x/kernels.py is", "move /x/kernels.py"),
    (_set("kernels", is_ours=False, file=None), "kernels is missing", "--no-deps -e ."),
    (_set("kernels", file="/q/kernels/__init__.py"), "/q/kernels/__init__.py is", "Python in /p"),
    (_set("parallel", error="ImportError: scipy is required"), "BLAS: ImportError", '"scipy>=1.14,<2"'),
    (NO_LAYER, "cannot run a parallel loop", 'pip install --upgrade "tbb"'),
    (_both(NO_LAYER, _set("environment", NUMBA_THREADING_LAYER="tbb")),
     "cannot run a parallel loop", "unset NUMBA_THREADING_LAYER, which asks for tbb"),
    (_set("cache", why_not="[Errno 13] Permission denied"), "Permission denied", "NUMBA_CACHE_DIR"),
    (_set("library", refused={"/c/d": "every user can write to /c"}), "can write to /c", "chmod go-w"),
    (_set("environment", NUMBA_DISABLE_JIT="1"), "NUMBA_DISABLE_JIT", "unset NUMBA_DISABLE_JIT"),
    (_set("environment", MINITORCH_RUNG="flash9"), "'flash9'", "set it to one of flash2, naive"),
    (_set("cuda", error="ValueError: NUMBA_CUDA_DRIVER /nope is not a valid file path"),
     "numba.cuda cannot be imported", "unset NUMBA_CUDA_DRIVER, or set it right"),
    (_set("library", error="NameError: name 'x'", place="/p/minitorch/operators.py:7"),
     "import minitorch fails: NameError", "/p/minitorch/operators.py:7"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "what", "remedy"), SICK)
def test_each_problem_is_named_with_what_mends_it(change: Change, what: str, remedy: str) -> None:
    facts = copy.deepcopy(WELL)
    change(facts)
    found = [finding for finding in diagnose(facts) if finding.is_problem]
    assert len(found) == 1, found
    assert what in found[0].what
    assert remedy in found[0].remedy
    said = report(facts, found)
    assert f"PROBLEM: {found[0].what}\n  what to do: {found[0].remedy}" in said
    assert said.endswith("\n1 problem")


#: What is worth a word, and no problem.
FINE: list[tuple[Change, str, str]] = [
    (lambda facts: None, "", ""),
    (NO_GPU, "", ""),
    (_both(NO_GPU, _set(installed={}, cuda={
        "file": "/s/numba/cuda/__init__.py", "emulated": False, "compile_error": "no libnvvm",
    })), "CUDA kernels cannot be compiled", "if kernels are to be compiled here"),
    (NO_NUMBA_CUDA, "no numba-cuda", 'pip install "numba-cuda[cu13]'),
    (_both(NO_NUMBA_CUDA, _set("python", version="3.15.0")), "no numba-cuda", "anew with Python <3.15"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said", "remedy"), FINE)
def test_what_is_no_problem_is_at_most_said(change: Change, said: str, remedy: str) -> None:
    facts = copy.deepcopy(WELL)
    change(facts)
    found: list[Finding] = diagnose(facts)
    assert not any(finding.is_problem for finding in found)
    assert [said in one.what and remedy in one.remedy for one in found] == [True] * bool(said)
    assert report(facts, found).endswith("no problems")
