"""Build an approximate attention from its name and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy.typing as npt

from kernels.common.arguments import shown

from ...tensor_ops import TensorBackend
from .block_sparse import block_sparse
from .linear import linear
from .linformer import Linformer
from .local import local
from .performer import Performer
from .reformer import reformer
from .smyrf import smyrf
from .support import SUPPORTED, Masked, check_options

#: Arguments that each call passes, rather than the construction of a layer.
OF_A_CALL = {"q", "k", "v", "key_mask", *Masked._fields}
_BUILDERS: dict[str, Callable[..., Any]] = {
    "linformer": Linformer, "linear": linear, "performer": Performer, "local": local,
    "reformer": reformer, "smyrf": smyrf, "block_sparse": block_sparse,
}  # fmt: skip
APPROXIMATIONS = tuple(SUPPORTED)


def make_attention(
    method: str,
    options: Mapping[str, Any],
    masked: Masked,
    backend: TensorBackend,
    dtype: npt.DTypeLike | None,
) -> Callable[..., Any]:
    """Return a function, or a module if the method has parameters, of q, k, v and the options of a call.

    Args:
        method: One of ``APPROXIMATIONS``.
        options: Options of the method itself, by name.
        masked: The masking options that each call will pass.
        backend: Backend of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: For an unknown option, or if a required option is missing.
        ValueError: If the method does not support an option that each call will pass.
    """
    check_options(method, masked)
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(
            "attention_options must be a dict of options by name, such as {'chunk': 64}, got "
            f"{shown(options)}"
        )
    build = _BUILDERS[method]
    is_module = isinstance(build, type)
    known = inspect.signature(build).parameters
    names = [name for name in known if name not in OF_A_CALL | {"backend", "dtype"}]
    needed = [name for name in names if known[name].default is inspect.Parameter.empty]
    if unknown := sorted(set(options) - set(names)):
        raise TypeError(
            f"{method} attention has no option {', '.join(unknown)}; it has {', '.join(names)}"
        )
    if missing := [name for name in needed if name not in options]:
        raise TypeError(
            f"{method} attention needs {' and '.join(missing)}: pass attention_options="
            f"{{{', '.join(f'{name!r}: …' for name in missing)}}}"
        )
    if not is_module:
        return partial(build, **options)
    places = {"backend": backend, "dtype": dtype} if "backend" in known else {}
    return build(**options, **places)
