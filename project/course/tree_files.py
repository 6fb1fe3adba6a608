"""Which files a starter tree holds: a list for each module, and copies of these files with holes.

A line that ends in ``# beyond module 4`` opens a hole in the trees of module 4 and of earlier ones: they do
not have the line, nor the lines below it that are indented deeper or close its bracket.  So does
``# until module 4`` in the trees of later modules; ``# beyond module 0, until module 1`` does both.
"""

from __future__ import annotations

import re
from pathlib import Path

from course.markers import ROOT, read_text
from course.tasks import MODULES, tasks_of

#: Module → what its tree and those of later modules have, but for files after a minus; scripts, pages,
#: tests and ``Module.files`` are of one module.
FILES = (
    """
    minitorch/__init__.py minitorch/module.py minitorch/operators.py project/app.py
    project/app_pages/__init__.py project/app_pages/guide.py project/app_pages/pictures.py
    project/app_pages/widgets.py project/common/__init__.py project/common/command_line.py
    project/common/notebooks.py tests/__init__.py tests/conftest.py tests/strategies.py
    """,
    """
    minitorch/autodiff.py
    """,
    """
    kernels/common/arguments.py kernels/runtime/dtypes.py minitorch/tensor.py minitorch/tensor_data.py
    minitorch/tensor_functions.py minitorch/tensor_ops.py minitorch/optim.py
    minitorch/scalars/modes.py minitorch/tensors/conversions.py minitorch/backends/dtype_promotion.py
    minitorch/backends/elements.py minitorch/backends/memory.py minitorch/backends/plain_math.py
    minitorch/backends/result_shapes.py minitorch/backends/running.py
    minitorch/backends/tensor_protocol.py minitorch/functions/base.py minitorch/functions/views.py
    minitorch/tensors/container.py minitorch/tensors/factories.py minitorch/tensors/making.py
    minitorch/tensors/operator_methods.py minitorch/training/steps.py tests/support/mistakes.py
    tests/support/tolerances.py
    """,
    """
    kernels/runtime/cuda_errors.py kernels/runtime/disk_cache.py kernels/runtime/jit.py
    kernels/runtime/numba_patches.py kernels/runtime/targets.py kernels/runtime/types.py
    kernels/cuda/emulator/*.py -kernels/cuda/emulator/tensor_maps.py minitorch/cuda_ops.py
    minitorch/fast_ops.py minitorch/backends/compiled_*.py minitorch/backends/device_memory.py
    """,
    """
    minitorch/nn.py minitorch/modules_basic.py minitorch/layers/checks.py minitorch/layers/indices.py
    minitorch/layers/linear.py
    """,
    """
    kernels/__init__.py kernels/array_call.py kernels/launch.py kernels/operand_types.py
    kernels/rungs.py kernels/common/geometry.py kernels/common/online_softmax.py
    kernels/common/philox.py kernels/cuda/backend.py kernels/cuda/attention/flash1.py
    kernels/cuda/attention/flash1_tiles.py
    kernels/cuda/attention/naive.py kernels/cuda/attention/practice.py
    kernels/cuda/attention/register_tiles.py kernels/cuda/attention/split_keys.py
    kernels/cuda/attention/tile_bits.py kernels/cuda/attention/flash2/*.py
    -kernels/cuda/attention/flash2/mask_gradient.py kernels/cuda/attention/options/extras.py
    kernels/cuda/attention/options/score_functions.py kernels/cuda/attention/options/tile_scores.py
    kernels/cuda/attention/options/visits.py kernels/cuda/device/half.py kernels/cuda/device/memory.py
    kernels/cuda/device/one_source.py kernels/cuda/device/row_folds.py
    kernels/cuda/device/shared_tiles.py kernels/cuda/device/vector.py
    kernels/cuda/matmul/cuda_cores.py kernels/cuda/ptx/llvm.py kernels/cuda/runtime/arrays.py
    kernels/cuda/runtime/compiling.py kernels/cuda/runtime/kernel.py kernels/cuda/runtime/recorder.py
    kernels/cuda/runtime/sizes.py kernels/metering/io_meter.py
    kernels/problem/*.py -kernels/problem/cached_keys.py -kernels/problem/chunks.py
    -kernels/problem/listed_mods.py
    -kernels/problem/packed_problem.py -kernels/problem/packed_sequences.py -kernels/problem/float8.py
    kernels/reference/attention.py kernels/reference/lines.py kernels/reference/scores.py
    kernels/reference/softmax_ladder.py kernels/runtime/memory.py kernels/scores/program.py
    kernels/scores/visibility.py kernels/sparsity/*.py -kernels/sparsity/elements.py
    -kernels/sparsity/picture.py kernels/traffic/*.py minitorch/transformer.py
    minitorch/attention/*.py minitorch/backends/kernel_memory.py minitorch/functions/dropout_seeds.py
    minitorch/functions/flash_attention.py minitorch/functions/several.py
    minitorch/layers/linear_cross_entropy.py minitorch/models/config.py minitorch/models/evaluation.py
    minitorch/models/feed_forward.py minitorch/models/sampling.py minitorch/models/text_generation.py
    minitorch/tensors/attention_methods.py
    """,
)
#: Stands in the trees before module 3 for a backend that it brings, so that earlier files can name it.
BEFORE = '''"""The {0} backend: module 3 brings it. Before it, the simple one stands here."""

from .tensor_ops import SimpleBackend as {0}Backend
from .tensor_ops import SimpleOps as {0}Ops

__all__ = ["{0}Backend", "{0}Ops"]
'''
MARK = re.compile(r"^( *).*# (?:beyond module (\d))?(?:, )?(?:until module (\d))?$")


def tree_texts(module: int, first: int) -> dict[str, str]:
    """Return the Python files of a starter tree: path inside it → text, tasks not emptied yet.

    Args:
        module: 0 to 5.
        first: The first module whose tests it has; those of later ones follow.
    """
    own = MODULES[module]
    patterns = [pattern for part in FILES[: module + 1] for pattern in part.split()]
    for number in range(first, module + 1):
        patterns += MODULES[number].files
        for task in tasks_of(number):
            patterns += task.tests
    patterns += [f"project/{name}.py" for name in own.scripts]
    patterns += [f"project/app_pages/{name}.py" for name in own.pages]
    files = {
        path.relative_to(ROOT)
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.name != "__init__.py" or pattern.endswith(path.name)
    } - {Path(pattern[1:]) for pattern in patterns if pattern[0] == "-"}
    texts = {file.as_posix(): read_text(ROOT / file) for file in files}
    if module == 2:
        for name in ("Fast", "Cuda"):
            texts[f"minitorch/{name.lower()}_ops.py"] = BEFORE.format(name)
    for folder in {folder for file in files for folder in file.parents}:
        init = (folder / "__init__.py").as_posix()
        if init not in texts and (ROOT / init).is_file():  # a folder that is needed, no more
            words = read_text(ROOT / init).split('"""')[1:2]
            texts[init] = "".join(f'"""{text}"""\n' for text in words)
    return {file: with_holes(texts[file], module, first) for file in sorted(texts)}


def with_holes(text: str, module: int, first: int) -> str:
    """Return a source without what lies beyond ``module``, or ends before the module ``first``."""
    kept, hole = list[str](), None
    for line in text.split("\n"):
        deeper = hole is not None and line.startswith(tuple(hole + sign for sign in " )]}"))
        if deeper or (hole is not None and not line.strip()):
            continue
        found = MARK.match(line)
        is_out = found and (module <= int(found[2] or -1) or first > int(found[3] or module))
        hole = found[1] if found and is_out else None
        while hole is not None and kept and kept[-1].startswith(f"{hole}#: "):  # what describes it
            kept.pop()
        if hole is None:
            kept.append(line)
    return "\n".join(kept)
