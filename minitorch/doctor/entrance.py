"""The first module of the package to be imported: run as a command that works anywhere, or check imports.

``python -m minitorch doctor`` runs here and ends.  Otherwise the libraries that minitorch needs are
imported, and an error of one of them names the doctor.  This module uses the standard library only, like
everything that the doctor imports, so that it runs where NumPy or numba cannot be imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import TracebackType

from minitorch.doctor.probes import found_file

DOCTOR = "python -m minitorch doctor"
_HERE = Path(__file__).resolve().parents[1]
#: Folders of this project's own code.
_OURS = {_HERE, _HERE.parent / "kernels"}


def runs_as_command(package: str) -> bool:
    """Tell whether Python imports a package in order to run it, as ``python -m package``.

    Source: Python's manual, "Command line and environment", ``-m``: while the module is being located,
    the first element of ``sys.argv`` is ``"-m"``.
    """
    given = getattr(sys, "argv", [])
    if given[:1] != ["-m"]:
        return False
    asked = getattr(sys, "orig_argv", None)  # new in Python 3.10
    return asked is None or asked[-len(given)] in (package, f"-m{package}")


def check_kernels() -> None:
    """Check that ``import kernels`` finds this project's package.

    Scripts are often called ``kernels.py``, and Python looks beside the script first.

    Raises:
        ImportError: If it finds another file.  The message names the file.
    """
    file = found_file("kernels")
    if file is None or _lies_here(file) or (Path(file).parent / "launch.py").is_file():
        return  # missing, ours, or ours in another copy of the project
    raise ImportError(
        f"minitorch needs its own package kernels, but `import kernels` finds {file} instead. Rename "
        f"or move {file}, or take its folder off PYTHONPATH; `{DOCTOR}` says more",
        name="kernels",
        path=file,
    )


class naming_the_doctor:
    """Convert an exception of a dependency inside the ``with`` to an ImportError that names the doctor.

    Exceptions of this project's own code, which a student may be working on, are not converted.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, (Exception, SystemExit)) and not is_ours(error):
            raise ImportError(
                f"minitorch cannot be imported here ({describe(error)}); run `{DOCTOR}`, which reports "
                "what is wrong with this environment and how to fix it"
            ) from error


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def is_ours(error: BaseException) -> bool:
    """Tell whether an exception comes from this project's code, and not from a dependency."""
    if isinstance(error, ImportError) and error.name is not None:
        top = sys.modules.get(error.name.split(".")[0])
        return _lies_here(getattr(top, "__file__", None))
    if isinstance(error, SyntaxError):
        return _lies_here(error.filename)
    place, trace = None, error.__traceback__
    while trace is not None:
        place, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return _lies_here(place)


def _lies_here(file: str | None) -> bool:
    return file is not None and not _OURS.isdisjoint(Path(file).resolve().parents)


if runs_as_command("minitorch"):
    from minitorch.doctor.command import main

    sys.exit(main(sys.argv[1:]))
check_kernels()
with naming_the_doctor():
    for _library in ("numpy", "ml_dtypes", "safetensors.numpy", "scipy", "kernels.runtime.targets"):
        import_module(_library)
