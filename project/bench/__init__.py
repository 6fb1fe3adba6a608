"""How to measure, what is compared with what, records and tables.

PyTorch is loaded before anything of ours.  Both may share one OpenMP runtime, which waits as the one that
loads it wants: PyTorch spins and ``kernels`` sleeps, with which a small threaded call of PyTorch takes
thirty times as long.
"""

from contextlib import suppress

with suppress(ImportError):
    import torch as torch  # type: ignore[import-not-found]
