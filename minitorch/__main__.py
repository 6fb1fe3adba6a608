"""``python -m minitorch doctor``, which the first import answers; see :mod:`minitorch.doctor.entrance`."""

import sys

from minitorch.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
