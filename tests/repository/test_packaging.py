"""What is handed out works elsewhere: a source archive, a wheel of it, an environment of its own."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

import minitorch
from minitorch.doctor.rules import is_within

ROOT = Path(__file__).parents[2]
FILES = ("setup.py", "requirements.txt", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
PACKAGES = ("minitorch", "kernels")
#: With which setuptools makes wheels by itself.
SETUPTOOLS = ">=70.1,<1000"

#: Run by a stranger: attention of the compiled backend against the textbook's.
PROGRAM = """
import numpy as np, kernels, minitorch
q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 9, 4))
probs = np.exp(np.where(np.tri(9), q @ k.swapaxes(-1, -2) / 2, -np.inf))
tensors = (minitorch.from_numpy(x) for x in (q, k, v))
out = next(tensors).flash_attention(*tensors, is_causal=True).to_numpy()
expected = probs / probs.sum(-1, keepdims=True) @ v
np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
print(minitorch.__file__, kernels.__file__, sep="\\n")
"""


def run(*command: str, folder: Path) -> str:
    """Run a command in a folder, without what this process was told about imports."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "NUMBA_ENABLE_CUDASIM", "MINITORCH_EMULATE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Call what pyproject.toml names as the builder, as pip does; return the file that it makes."""
    call = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run(sys.executable, "-c", call, folder=source)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a source archive of a clean copy, and a wheel of nothing but the archive."""
    version = importlib.metadata.version("setuptools")
    if not is_within(version, SETUPTOOLS):
        pytest.skip(f"setuptools is {version}, needed is {SETUPTOOLS}: pip install -e '.[test]'")
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    for package in PACKAGES:
        copytree(ROOT / package, source / package, ignore=ignore_patterns("__pycache__"))
    for file in FILES:
        copy(ROOT / file, source / file)
    archive = build("sdist", source, folder / "archive")
    with tarfile.open(archive) as packed:
        packed.extractall(folder)
    (unpacked,) = folder.glob("minitorch_flash-*")
    return build("wheel", unpacked, folder / "wheel")


def names(requirements: list[str]) -> set[str]:
    """Return the names in requirements as package indexes write them; setuptools may do so or not."""
    found = (re.match(r"[\w.-]+", need) for need in requirements)
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in found if name}


def test_a_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        files = {name for name in packed.namelist() if ".dist-info/" not in name}
        (about,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
        metadata = packed.read(about).decode()
    expected = {p.relative_to(ROOT).as_posix() for f in PACKAGES for p in (ROOT / f).rglob("*.py")}
    assert files == expected | {f"{package}/py.typed" for package in PACKAGES}
    assert {f"Version: {minitorch.__version__}", "License: MIT"} <= set(metadata.splitlines())
    with zipfile.ZipFile(wheel) as packed:
        assert any(name.endswith("LICENSE") for name in packed.namelist())
    needed = re.findall(r"^Requires-Dist: ([^;\n]*)$", metadata, re.MULTILINE)
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (bounds,) = re.findall(r"^Requires-Python: (.+)$", metadata, re.MULTILINE)
    pythons = re.findall(r"^Classifier: .+ :: Python :: (3\.\d+)$", metadata, re.MULTILINE)
    assert pythons == [f"3.{n}" for n in range(100) if is_within(f"3.{n}", bounds)]
    assert names(needed) == names([line for line in lines if line[:1] not in ("", "#")])


@pytest.mark.slow
def test_an_installed_wheel_computes_attention_outside_of_the_checkout(
    wheel: Path, tmp_path: Path
) -> None:
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", str(fresh), folder=tmp_path)
    python = fresh / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index")
    run(*pip, "--no-deps", "--quiet", str(wheel), folder=tmp_path)
    place = run(
        str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path
    )
    # The dependencies are those of the environment that runs the tests; its own copy of the project,
    # installed to be edited, is not found through a plain path.
    others = {str(Path(str(importlib.metadata.distribution(name).locate_file(""))))
              for name in ("numpy", "numba", "scipy", "ml_dtypes", "threadpoolctl")}  # fmt: skip
    (Path(place.strip()) / "dependencies.pth").write_text(
        "\n".join(sorted(others)), encoding="utf-8"
    )
    outside = tmp_path / "outside"
    outside.mkdir()
    files = run(str(python), "-c", PROGRAM, folder=outside).splitlines()
    assert all(Path(file).is_relative_to(Path(place.strip())) for file in files)
