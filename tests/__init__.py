"""The tests; where there is no GPU, they choose the emulated one themselves."""

import os

os.environ.setdefault("MINITORCH_EMULATE", "0")
