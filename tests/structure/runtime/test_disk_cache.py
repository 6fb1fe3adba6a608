"""Machine code on disk: damaged files are compiled again, and unsafe folders are not read."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from kernels.runtime import disk_cache
from kernels.runtime.jit import JIT_DISABLED, njit_cached

pytestmark = pytest.mark.skipif(JIT_DISABLED, reason="nothing is compiled")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*values: Any) -> int:
    """Call a kernel as a new process would; return how many signatures were compiled."""

    def double(x: Any) -> Any:
        return x + x

    kernel = njit_cached(double)
    assert [kernel(value) for value in values] == [value + value for value in values]
    return sum(kernel.stats.cache_misses.values())


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "random": lambda content: np.random.default_rng(0).bytes(len(content)),
    "one bit": lambda content: content[:-200] + bytes([content[-200] ^ 1]) + content[-199:],
    "another pickle": lambda content: b"\x80\x04N.",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again_with_a_warning(damage: str, folder: Path) -> None:
    assert run(1.0) == 1
    (file,) = folder.rglob("*.code")
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.warns(RuntimeWarning, match=f"{file.name} cannot be read .* compiled again"):
        assert run(1.0) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(1.0) == 0


def test_old_files_of_a_kernel_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_MOST_FILES", 2)
    assert run(1.0, 1, 1j) == 3
    assert len([*folder.rglob("*.code")]) == 2
    assert run(1, 1j) == 0


def test_a_full_disk_costs_only_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match=r"cannot be kept in .*cache.*No space left on device"):
        assert run(1.0) == 1
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_without_a_writable_folder_kernels_are_compiled_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    disk_cache._warn.cache_clear()
    with pytest.warns(RuntimeWarning, match="no folder for compiled kernels can be written"):
        run(1.0)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(
    ("mode", "parents"), [(0o777, False), (0o1777, False), (0o777, True), (0o1777, True)]
)
def test_a_folder_that_others_can_write_to_is_not_read(
    mode: int, parents: bool, folder: Path, tmp_path: Path
) -> None:
    assert run(1.0) == 1
    (place,) = folder.iterdir()
    for file in place.iterdir():  # a pickle that makes a folder
        file.write_bytes(b"cos\nmkdir\n(V" + str(tmp_path / "ran").encode() + b"\ntR.")
    named = folder if parents else place
    named.chmod(mode)
    disk_cache._why_unsafe.cache_clear()
    if parents and mode & 0o1000:  # where only the owner of a file can replace it
        with pytest.warns(RuntimeWarning, match="do not match its digest"):
            run(1.0)
    else:
        with pytest.warns(RuntimeWarning, match=f"every user can write to {named},"):
            run(1.0)
        assert disk_cache.REFUSED.pop(str(place)) == f"every user can write to {named}"
    assert not (tmp_path / "ran").exists()
