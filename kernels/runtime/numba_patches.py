"""Every change that this project makes to numba itself, with its reason and its measured gain.

A change is made only to the versions in :data:`KNOWN`, for which it was written; other versions run as they
are.  Gains were measured with numba 0.68.1 and numba-cuda 0.30.4.
"""

from __future__ import annotations

import copy
from collections import Counter  # beyond module 5
from collections.abc import Callable, Iterator
from contextlib import contextmanager  # beyond module 5
from functools import cache
from importlib import import_module  # beyond module 4
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace  # beyond module 4
from typing import Any

import numpy as np
from numba.core.codegen import CPUCodeLibrary

from kernels.runtime.memory import uncollected  # beyond module 4

#: The versions that the changes are for: from the first up to, but excluding, the second.
KNOWN = {"numba": ((0, 61), (0, 69)), "numba-cuda": ((0, 30), (0, 31))}


@cache
def version_of(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def is_known(package: str) -> bool:
    """Tell whether a package is installed in a version that the changes are for."""
    first, end = KNOWN[package]
    own = version_of(package)
    return bool(own) and first <= tuple(map(int, own.split(".")[:2])) < end


def provider() -> str:
    """Return the package that provides ``numba.cuda``."""
    return "numba-cuda" if version_of("numba-cuda") else "numba"


def provide_row_stack() -> None:
    """Give NumPy 2.5 the name ``row_stack`` again, which numba-cuda reads when it is imported.

    Gain: without it, numba-cuda 0.30 cannot be imported.
    """
    if not hasattr(np, "row_stack"):
        # ruff's own fix for NPY201 turns this line into np.vstack = np.vstack, which does nothing.
        np.row_stack = np.vstack  # type: ignore[attr-defined]  # noqa: NPY201


def call_own_copies() -> None:
    """Make compiled functions for the CPU call their own copies of helpers and parallel loops.

    Numba does not define which copy is called.  The process that compiles also has the separately compiled
    helper, which LLVM may have optimised differently, and a process that loads the code from disk does not.

    Gain: without it, the first run on a machine has other last bits than later ones (in softmax and GELU).
    """
    optimize: Any = CPUCodeLibrary._optimize_final_module

    def optimize_own(library: Any) -> None:
        for function in library._final_module.functions:
            is_copy = not function.is_declaration and function.linkage.name == "linkonce_odr"
            if is_copy and not function.name.startswith("NRT_"):  # numba's own, which exist once
                function.linkage = "internal"
        optimize(library)

    if is_known("numba"):
        CPUCodeLibrary._optimize_final_module = optimize_own  # type: ignore[method-assign,assignment]


def keep_files(dispatcher: Any, index_key: Callable[..., Any], files: Callable[..., Any]) -> None:
    """Make the cache of a dispatcher, which is enabled, use other keys and files than numba's.

    Gain: numba's keys miss the functions that a kernel calls, and it runs any pickle that lies there.

    ``index_key`` returns the key of an entry for a signature and a code generator, and ``files`` what
    loads and saves entries, given numba's files and the beginning of their names.
    """
    own = dispatcher._cache
    own._index_key = index_key
    own._cache_file = files(own._cache_file, own._impl.filename_base)


def compile_in_less_time(cuda: Any) -> None:  # beyond module 4
    """Make numba-cuda leave out work of which nothing remains; see the functions below.

    Gain: kernels compile to PTX in less time, with the same code.
    """
    if is_known("numba-cuda") and hasattr(cuda, "core"):
        for change in (
            _collect_afterwards,
            _count_assignments,  # beyond module 5
            _inline_one_copy,
            _keep_defaults,
            _order_blocks,
            _rewrite_where_named,
            _skip_live_variables,
            _skip_ufuncs,
        ):
            change(cuda)


def _collect_afterwards(cuda: Any) -> None:  # beyond module 4
    """Make numba-cuda compile a kernel to LLVM's code without garbage collection.

    Gain: the collector visits the statements of the kernel, which all stay, for a sixth of the time.
    """
    for module in (cuda.compiler, cuda.dispatcher):
        module.compile_cuda = uncollected()(module.compile_cuda)


def _count_assignments(cuda: Any) -> None:  # beyond module 5
    """Make numba-cuda find the variables that are assigned once, and read in that block, in one pass.

    Gain: for each variable, it visits all statements of its block.
    """
    lowering, assigned = cuda.lowering, cuda.core.ir.assign_types

    def find(self: Any) -> None:
        blocks, once = self.func_ir.blocks, set[str]()
        if not self.func_ir.func_id.is_generator:
            others = set(lowering.must_use_alloca(blocks))
            definitions = lowering.compute_use_defs(blocks)
            others.update(*definitions.usemap.values())
            every = (line.target.name for b in blocks.values() for line in b.find_insts(assigned))
            once = {name for name, count in Counter(every).items() if count == 1}
            once &= set().union(*definitions.defmap.values())
            once -= others
        self._singly_assigned_vars, self._blk_local_varmap = once, {}

    lowering.Lower._find_singly_assigned_variable = find


def _keep_defaults(cuda: Any) -> None:  # beyond module 4
    """Make numba-cuda look up the defaults of its flags once.

    Gain: it compares all flags by one property each, several times for each call that it types.
    """
    flags = cuda.core.targetconfig.TargetConfig

    @cache
    def defaults(kind: type) -> dict[str, Any]:
        return {name: option.default for name, option in kind.options.items()}  # type: ignore[attr-defined]

    flags.values = lambda self: defaults(type(self)) | self._values


def _order_blocks(cuda: Any) -> None:  # beyond module 4
    """Make numba-cuda look for live variables along the flow of control, block by block.

    Gain: it takes blocks as they were inlined, and a variable one block further each time.
    """
    analysis = cuda.core.analysis
    live_map = analysis.compute_live_map

    def compute_live_map(cfg: Any, blocks: Any, uses: Any, definitions: Any) -> Any:
        order = [*cfg.topo_order(), *cfg.dead_nodes()]
        forwards = {label: definitions[label] for label in order}
        found = live_map(cfg, dict.fromkeys(reversed(order)), uses, forwards)
        return {label: found[label] for label in blocks}

    analysis.compute_live_map = compute_live_map


def _inline_one_copy(cuda: Any) -> None:  # beyond module 4
    """Make the inliner prepare a device function once per kernel, and copy it once per call.

    Gain: for each call it prepares the function, and all that it calls, again, and copies the result
    twice, with its variables for each block and with the places in the source.
    """
    inlining = cuda.core.inline_closurecall
    fresh: Any = None  # the scope of a copy that nothing else refers to

    def deepcopy(block: Any) -> Any:
        return block if block.scope is fresh else copy.deepcopy(block)

    def inline_function(
        worker: Any, caller: Any, block: Any, at: int, function: Any, arg_types: Any = None
    ) -> Any:
        nonlocal fresh
        prepared = vars(worker.pipeline).setdefault("prepared", {})  # of one kernel
        if function not in prepared:
            prepared[function] = worker.run_untyped_passes(function)
        callee = prepared[function].copy()
        callee.blocks = copy.deepcopy(callee.blocks)
        callee.func_id = callee.func_id.derive()  # after which variables are named
        fresh = next(iter(callee.blocks.values())).scope
        free = function.__code__.co_freevars
        return worker.inline_ir(caller, block, at, callee, free, arg_types)

    cuda.core.ir.Loc.__deepcopy__ = lambda place, memo: place
    inlining.copy = SimpleNamespace(deepcopy=deepcopy)
    inlining.InlineWorker.inline_function = inline_function


def _rewrite_where_named(cuda: Any) -> None:  # beyond module 4
    """Make numba-cuda rewrite only the blocks that name a variable, to assign each variable once.

    Gain: for each variable that is assigned several times it visits all statements of the kernel twice.
    """
    ssa = cuda.core.ssa
    run, rewrite = ssa._run_ssa, ssa._run_block_rewrite
    named: dict[int, set[str]] = {}

    def run_ssa(blocks: Any) -> Any:
        named.clear()
        for label, block in blocks.items():
            named[label] = {var.name for line in block.body for var in line.list_vars()}
        return run(blocks)

    def rewrite_some(blocks: Any, states: Any, handler: Any) -> Any:
        found = {n: b for n, b in blocks.items() if states["varname"] in named[n]}
        return {**blocks, **rewrite(found, states, handler)}

    ssa._run_ssa, ssa._run_block_rewrite = run_ssa, rewrite_some


def _skip_live_variables(cuda: Any) -> None:  # beyond module 4
    """Make numba-cuda find the variables that live at a block when they are read.

    Gain: it finds them after each change of a kernel or of an inlined function, and reads them once.
    """
    processor = cuda.core.postproc.PostProcessor
    run_all = processor.run

    def run(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        func = self.func_ir
        if emit_dels or func.is_generator:
            run_all(self, emit_dels, extend_lifetimes)
        else:
            func.blocks = cuda.core.transforms.canonicalize_cfg(func.blocks)
            func.variable_lifetime = cuda.core.postproc.VariableLifetime(func.blocks)
            func.generator_info = None

    processor.run = run


def _skip_ufuncs(cuda: Any) -> None:  # beyond module 4
    """Make numba-cuda try an operator as one of NumPy's arrays only where an operand is an array.

    Gain: it searches the loops of NumPy for the types of each operation of numbers, and takes none.
    """
    rules = import_module(f"{cuda.__name__}.typing.npydecl")
    operators = rules.NumpyRulesArrayOperator
    generic = operators.generic

    def of_arrays(self: Any, args: Any, kws: Any) -> Any:
        arrays = [kind for kind in args if isinstance(kind, rules.types.ArrayCompatible)]
        return generic(self, args, kws) if arrays else None

    operators.generic = of_arrays


#: Functions of the driver by which numba copies, allocates and waits.
_NUMBAS = (  # beyond module 5
    "cuMemAlloc", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuMemsetD8", "cuMemsetD8Async", "cuCtxSynchronize",
    "cuStreamSynchronize", "cuEventSynchronize", "cuEventRecord", "cuStreamWaitEvent",
)  # fmt: skip


@contextmanager  # beyond module 5
def watching_numba(cuda: Any, refuse: Callable[[str], None]) -> Iterator[None]:  # beyond module 5
    """Call a function before numba itself launches a kernel, copies, allocates or waits.

    Launches and copies of this library are not affected, because they call the driver directly.
    ``refuse`` receives a description of what numba is about to do, and may raise an error.

    Gain: a captured step refuses work that its graph would miss.
    """
    kernels, driver = cuda.dispatcher._Kernel, cuda.cudadrv.driver.driver
    numbas = {(driver, name): f"has numba copy, allocate or wait ({name})" for name in _NUMBAS}
    numbas[kernels, "launch"] = "launches a kernel by numba (cuda.jit)"
    before = {at: getattr(*at) for at in numbas if is_known(provider())}

    def watched(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            refuse(what)
            return function(*args, **options)

        return call

    try:
        for (holder, name), function in before.items():
            setattr(holder, name, watched(function, numbas[holder, name]))
        yield
    finally:
        for (holder, name), function in before.items():
            setattr(holder, name, function)
