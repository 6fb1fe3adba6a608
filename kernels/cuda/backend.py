"""The CUDA kernels and runtime functions that a tensor library uses."""

from __future__ import annotations

from kernels.cuda.device.half import as_bits, form
from kernels.cuda.device.memory import DeviceMemory, fill, row_major_copy
from kernels.cuda.layers import indexing  # beyond module 5
from kernels.cuda.layers.merge_rows import merge_rows  # beyond module 5
from kernels.cuda.runtime.arrays import (
    device_view,
    element_strides,
    empty_device,
    flattened,
    is_device_array,
    pool,
    to_device,
    to_host,
)
from kernels.cuda.runtime.graphs import Graph  # beyond module 5
from kernels.cuda.runtime.kernel import (
    ALL_LANES,
    WARP,
    Adopted,
    Kernel,
    device_callable,
    device_function,
    scalar_type,
)
from kernels.cuda.runtime.recorder import (
    Recording,  # beyond module 5
    active,
    between_launches,  # beyond module 5
    computed,
    drawn,
    recorded_by,  # beyond module 5
    refuse,
)
from kernels.cuda.runtime.repeated import bound, repeats  # beyond module 5
from kernels.cuda.runtime.sizes import SIZES, FoldShape

__all__ = [  # noqa: RUF022  # grouped by use
    # Arrays on the device.
    "DeviceMemory", "as_bits", "device_view", "element_strides", "empty_device", "fill", "flattened",
    "is_device_array", "pool", "row_major_copy", "to_device", "to_host",
    "bound", "repeats",  # beyond module 5
    # Kernels of the library's own.
    "ALL_LANES", "SIZES", "WARP", "Adopted", "FoldShape", "Kernel", "device_callable", "device_function",
    "form", "scalar_type",
    # Layers.
    "indexing", "merge_rows",  # beyond module 5
    # Recording a step as a graph.
    "active", "computed", "drawn", "refuse",
    "Graph", "Recording", "between_launches",  # beyond module 5
    "recorded_by",  # beyond module 5
]  # fmt: skip
