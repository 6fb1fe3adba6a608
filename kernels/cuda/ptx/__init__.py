"""Tensor-core instructions, each once: its PTX, what its lanes hold, and NumPy that does the same.

======================  ===========================================================================
``inline``              how an instruction becomes a function that kernels call
``fragments``           which element of a tile a lane's register holds, as plain functions
``swizzle``             where a tile's elements lie in shared memory, without bank conflicts
``numbers``             conversions between float32 and packed pairs of 16 bits; powers of two
``copies``              addresses, 128-bit loads and stores, ``cp.async``, additions in memory
``mma``                 ``ldmatrix``, ``stmatrix``, ``mma.sync``
``barriers``            ``mbarrier``, named barriers, fences, one lane of a warp, register shares
``bulk``                copies by the copy engine: plain ones, and boxes of a tensor (TMA)
``tensor_map``          the host's half of those: what a tensor looks like
``wgmma``               products of a warpgroup, operands in shared memory behind descriptors
``emulated.numbers``,
``emulated``,
``emulated.wgmma``      the same instructions on NumPy arrays of (lanes, registers)
======================  ===========================================================================

Source of everything here: NVIDIA, Parallel Thread Execution ISA.  Names are those of PTX.
"""
