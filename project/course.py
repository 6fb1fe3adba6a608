"""Hand out the course and grade it.

    python project/course.py start 3 my-module-3              a starter tree of module 3
    python project/course.py start 3 my-module-3 --from my-module-2
    python project/course.py grade my-module-3                task by task: passed, failed, blocked
    python project/course.py grade . --task 3.2 --json result.json

``grade`` ends with 0 if nothing failed, 1 if something did, 2 if it could not be run.
"""

from __future__ import annotations

import sys

from course.command import main

if __name__ == "__main__":
    sys.exit(main())
