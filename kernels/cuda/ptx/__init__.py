"""Tensor-core instructions, each defined once: its PTX, the layout of its operands, and a NumPy emulation.

======================  ===========================================================================
``inline``              turns an instruction into a function that kernels call
``llvm``                functions that emit LLVM's own instructions: vectors, conversions
``emitted``             functions that numba compiles once and LLVM inlines
``fragments``           the element of a tile that a lane's register holds, as plain functions
``swizzle``             places of a tile's elements in shared memory, without bank conflicts
``numbers``             conversions between float32 and packed pairs of 16 bits; powers of two
``copies``              addresses, 128-bit loads and stores, ``cp.async``, additions in memory
``mma``                 ``ldmatrix``, ``stmatrix``, ``mma.sync``
``barriers``            ``mbarrier``, named barriers, fences, one lane of a warp, register shares
``bulk``                copies by the copy engine: plain ones, and boxes of a tensor (TMA)
``tensor_map``          the host's part of these copies: descriptions of tensors
``wgmma``               products of a warpgroup, operands in shared memory behind descriptors
``emulated.numbers``,
``emulated``,
``emulated.wgmma``      the same instructions on NumPy arrays of (lanes, registers)
======================  ===========================================================================

The source is NVIDIA, Parallel Thread Execution ISA.  Names are those of PTX.
"""
