"""Numba is changed in one file, in the versions that can be installed and no other, for a measured gain."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from numba.core.codegen import CPUCodeLibrary

import kernels
from kernels.runtime import numba_patches, targets
from kernels.runtime.numba_patches import KNOWN

ROOT = Path(kernels.__file__).parents[1]


def test_numba_is_changed_in_the_versions_that_can_be_installed() -> None:
    required = (ROOT / "requirements.txt").read_text() + (ROOT / "setup.py").read_text()
    for package, bounds in KNOWN.items():
        (found,) = re.findall(rf"\b{package}(?:\[cu13\])?>=(\d+)\.(\d+),<(\d+)\.(\d+)", required)
        assert (tuple(map(int, found[:2])), tuple(map(int, found[2:]))) == bounds
        assert numba_patches.version_of(package) == "" or numba_patches.is_known(package)
    assert CPUCodeLibrary._optimize_final_module.__module__ == numba_patches.__name__
    if numba_patches.is_known("numba-cuda") and not targets.IS_SIMULATOR:
        assert isinstance(targets.cuda.core.inline_closurecall.copy, numba_patches.Copies)


def test_another_numba_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    inliner = SimpleNamespace(copy=None)
    cuda = SimpleNamespace(core=SimpleNamespace(inline_closurecall=inliner))
    shared, before = SimpleNamespace(array=None), CPUCodeLibrary._optimize_final_module
    monkeypatch.setattr(numba_patches, "version_of", lambda package: "0.99.1rc1")
    numba_patches.call_own_copies()
    numba_patches.share_arrays(shared)
    numba_patches.share_copies(cuda)
    with numba_patches.watching_numba(cuda, print):
        assert inliner.copy is None and shared.array is None
    assert CPUCodeLibrary._optimize_final_module is before


def test_each_change_of_numba_says_what_it_gains() -> None:
    others = {"version_of", "is_known", "provider"}
    own = inspect.getmembers(numba_patches, inspect.isfunction)
    for name, function in own:
        if function.__module__ == numba_patches.__name__ and name not in others:
            assert "Gain: " in (function.__doc__ or ""), name
