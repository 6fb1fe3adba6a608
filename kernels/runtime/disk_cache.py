"""Keep numba's machine code on disk: in a folder that only this user can write to, checked when it is read.

Numba reads its files with ``pickle``, which runs whatever they contain.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from kernels.runtime.numba_patches import is_known, keep_files

if os.name == "posix":
    import grp
    import pwd

#: Folders that are not used, with the reason; the doctor reads it.
REFUSED: dict[str, str] = {}
_REMEDY = "set NUMBA_CACHE_DIR to a folder that only you can write to"


def keep_on_disk(dispatcher: Any, index_key: Callable[..., Any]) -> None:
    """Have a dispatcher of numba or numba.cuda keep its machine code on disk, where that is possible.

    ``index_key`` returns the key of an entry for a signature and a code generator; its ``repr`` tells
    keys apart.
    """
    without = dispatcher._cache
    if not is_known("numba"):
        _warn(
            "compiled kernels are not kept on disk by this version of numba; install numba 0.61 to 0.68"
        )
        return
    try:
        dispatcher.enable_caching()
    except RuntimeError:
        _warn(
            "no folder for compiled kernels can be written, so every process compiles them again; "
            + _REMEDY
        )
        return
    cache = dispatcher._cache
    source = os.path.dirname(dispatcher.py_func.__code__.co_filename)
    if reason := _why_unsafe(cache.cache_path, source):
        REFUSED[cache.cache_path] = reason
        _warn(
            f"compiled kernels are not kept on disk, because {reason}, and whoever changes them runs code "
            f"in this process; {_REMEDY}"
        )
        dispatcher._cache = without
        return
    keep_files(dispatcher, index_key, partial(_Files, Path(cache.cache_path)))


@lru_cache(maxsize=256)
def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


#: Maximum number of files of a kernel; the oldest are removed.
_MOST_FILES = 1024


class _Files:
    """The files of a kernel, one for each entry, named by its key; damaged ones are discarded.

    ``numbas`` are the files of numba or numba-cuda, which knows how to pickle and to replace a file;
    ``name`` is the beginning of their names.
    """

    def __init__(self, folder: Path, numbas: Any, name: str):
        self._numbas, self._folder, self._name = numbas, folder, name

    def _path(self, key: Any) -> Path:
        return self._folder / f"{self._name}.{hashlib.sha256(repr(key).encode()).hexdigest()}.code"

    def load(self, key: Any) -> Any:
        """Return an entry; None if it is missing or damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            if _digest(path, content[32:]) != content[:32]:
                raise ValueError("its bytes do not match its digest")
            return pickle.loads(content[32:])
        except FileNotFoundError:
            return None
        except Exception as error:  # pickle may raise any
            _warn(f"{path} cannot be read ({error}); its kernel is compiled again")
            return None

    def save(self, key: Any, data: Any) -> None:
        """Write an entry."""
        path, content = self._path(key), self._numbas._dump(data)
        try:
            with self._numbas._open_for_write(str(path)) as file:
                file.write(_digest(path, content) + content)
            own = sorted(self._folder.glob(f"{self._name}.*.code"), key=os.path.getmtime)
            for old in own[:-_MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:  # a full disk, or a folder that has gone
            _warn(
                f"compiled kernels cannot be kept in {self._folder} ({error.strerror}), so every process "
                "compiles them again; make room there, or set NUMBA_CACHE_DIR to another folder"
            )


def _digest(path: Path, content: bytes) -> bytes:
    """Return a digest of a file's name, and so of its key, and of its contents."""
    return hashlib.sha256(path.name.encode() + content).digest()


# -- folders ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _why_unsafe(folder: str, source: str) -> str | None:
    """Return why other users could put a file into a folder of the cache, or None if they cannot.

    Users who can write to the folder of the source are trusted: they can change the kernels
    themselves.
    """
    if os.name != "posix":
        return None
    own, places = os.stat(source), [Path(folder).absolute(), Path(folder).resolve()]
    shared = {Path(source).absolute(), Path(source).resolve()}
    shared |= {parent for place in shared for parent in place.parents}
    for place in places:
        for each in (place, *place.parents):
            if each in shared:
                break
            found = each.lstat()
            if found.st_uid not in (0, os.geteuid(), own.st_uid):
                return f"{each} belongs to another user"
            mode = 0 if stat.S_ISLNK(found.st_mode) else found.st_mode
            if each not in places and mode & stat.S_ISVTX:
                continue  # where other users cannot replace a file of ours
            if mode & ~own.st_mode & stat.S_IWOTH:
                return f"every user can write to {each}"
            is_same = own.st_mode & stat.S_IWGRP and own.st_gid == found.st_gid
            if mode & stat.S_IWGRP and not is_same and not _is_private(found.st_gid):
                return f"a group of users can write to {each}"
    return None


def _is_private(group: int) -> bool:
    """Tell whether this user is the only member of a group, as many systems make one for each user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_own = group == user.pw_gid and found.gr_name == user.pw_name
    return group == 0 or (is_own and {*found.gr_mem} <= {user.pw_name})
