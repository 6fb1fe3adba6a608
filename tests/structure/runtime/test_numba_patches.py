"""Numba is changed in one file, in the versions that can be installed and no other, for a measured gain."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from numba.core.codegen import CPUCodeLibrary

from kernels.runtime import numba_patches
from kernels.runtime.numba_patches import KNOWN, is_known, version_of

ROOT = Path(__file__).parents[3]


def test_numba_is_changed_in_the_versions_that_can_be_installed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    required = (ROOT / "requirements.txt").read_text() + (ROOT / "setup.py").read_text()
    for package, bounds in KNOWN.items():
        (found,) = re.findall(
            rf"\b{package}(?:\[\w+\])?>=(\d+)\.(\d+)[.\d]*,<(\d+)\.(\d+)", required
        )
        assert tuple(map(int, found)) == (*bounds[0], *bounds[1])
        assert is_known(package) or not version_of(package), f"not tried: {package}"
    own = CPUCodeLibrary._optimize_final_module
    assert own.__module__ == numba_patches.__name__
    monkeypatch.setattr(numba_patches, "version_of", lambda package: "0.99.1")
    numba_patches.call_own_copies()
    numba_patches.compile_in_less_time(SimpleNamespace(core=None))  # which it would change
    assert CPUCodeLibrary._optimize_final_module is own
    others = version_of, is_known, numba_patches.provider
    for function in vars(numba_patches).values():
        if getattr(function, "__module__", "") == numba_patches.__name__ and function not in others:
            assert "Gain: " in str(function.__doc__), function
