"""Keep numba's machine code on disk: in a folder that only this user can write to, checked when it is read.

Numba reads its files with ``pickle``, which runs whatever they contain.
"""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numba.core.caching import IndexDataCacheFile as _Files
else:
    _Files = object  # numba's class, or that of numba-cuda

if os.name == "posix":
    import grp
    import pwd

#: Folders that are not used, with the reason; the doctor reads it.
REFUSED: dict[str, str] = {}
_REMEDY = "set NUMBA_CACHE_DIR to a folder that only you can write to"


def keep_on_disk(dispatcher: Any, index_key: Callable[..., Any], stamp: Any = None) -> None:
    """Have a dispatcher of numba or numba.cuda keep its machine code on disk, where that is possible.

    Args:
        dispatcher: The dispatcher.
        index_key: Returns the key of an entry for a signature and a code generator.
        stamp: Entries with another one are discarded; None is the hash of the source file.
    """
    without = dispatcher._cache
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
    cache._index_key = index_key
    stamp = cache._cache_file._source_stamp if stamp is None else stamp
    # Another name than numba's: its files have no digest.
    name = f"{cache._impl.filename_base}.checked"
    cache._cache_file = _checked(type(cache._cache_file))(cache.cache_path, name, stamp)
    cache.save_overload = partial(_saved, cache.save_overload, cache.cache_path)


def _saved(save: Callable[..., None], folder: str, *entry: Any) -> None:
    try:
        save(*entry)
    except OSError as error:  # a full disk, or a folder that has gone
        _warn(
            f"compiled kernels cannot be kept in {folder} ({error.strerror}), so every process compiles "
            "them again; make room there, or set NUMBA_CACHE_DIR to another folder"
        )


@lru_cache(maxsize=256)
def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


# -- files -----------------------------------------------------------------------------------------


class _Checked(_Files):
    """Files of a kernel that end with a digest; an entry holds its key, and damaged files are discarded.

    Without the key, a file that another process has just replaced would be taken for another entry's.
    """

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (key, data))

    def load(self, key: Any) -> Any:
        found = super().load(key)
        return found[1] if found is not None and found[0] == key else None

    def _load_index(self) -> Any:
        return self._read(self._index_path, super()._load_index) or {}

    def _load_data(self, name: str) -> Any:
        return self._read(self._data_path(name), partial(super()._load_data, name))

    def _read(self, path: str, load: Callable[[], Any]) -> Any:
        """Return the contents of a file; None if it is missing or damaged."""
        try:
            content = Path(path).read_bytes()
            if hashlib.sha256(content[:-32]).digest() != content[-32:]:
                raise ValueError("its bytes do not match its digest")
            return load()
        except FileNotFoundError:
            return None
        except Exception as error:  # pickle may raise any
            _warn(f"{path} cannot be read ({error}); its kernel is compiled again")
            return None

    @contextmanager
    def _open_for_write(self, filepath: str) -> Generator[Any, None, None]:
        with super()._open_for_write(filepath) as file:
            hashed = _Hashed(file)
            yield hashed
            file.write(hashed.digest.digest())


class _Hashed:
    """A file that is being written, and the digest of its bytes."""

    def __init__(self, file: Any):
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> None:
        self.digest.update(data)
        self._file.write(data)


@lru_cache(maxsize=4)
def _checked(kind: type) -> Any:
    """Return the class of checked files for numba's or numba-cuda's class."""
    return type("CheckedFile", (_Checked, kind), {})


# -- folders ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _why_unsafe(folder: str, source: str) -> str | None:
    """Return why other users could put a file into a folder, or None if they cannot.

    Users who can write to the folder of the source are trusted: they can change the kernels themselves.

    Args:
        folder: The folder of the cache.
        source: The folder of the source.
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
