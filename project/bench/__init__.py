"""How to measure, what is compared with what, records and tables.

PyTorch is loaded before anything of ours.  Both may share one OpenMP runtime, which waits as the one that
loads it wants: PyTorch spins and ``kernels`` sleeps, with which a small threaded call of PyTorch takes
thirty times as long.

What is measured is the GPU of this machine; the emulated one is chosen where accesses are counted.
"""

import os
from contextlib import suppress

os.environ.setdefault("MINITORCH_EMULATE", "0")
with suppress(ImportError):
    import torch as torch  # type: ignore[import-not-found]
