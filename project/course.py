"""Hand out the course and grade it; ``python project/course.py --help`` says how."""

from __future__ import annotations

import sys

from course.command import main

if __name__ == "__main__":
    sys.exit(main())
