"""Numba's types, as CUDA kernels name them: a package that takes numba-cuda's place has its own."""

from numba import float32 as float32
from numba import float64 as float64
from numba import from_dtype as from_dtype
from numba import int32 as int32
from numba import int64 as int64
from numba import types as types
from numba import uint8 as uint8
from numba import uint16 as uint16
from numba import uint32 as uint32
from numba import uint64 as uint64
from numba import void as void
