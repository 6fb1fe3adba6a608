"""What scripts of several packages share: the command line, and their behaviour in a notebook."""

import sys
from pathlib import Path

# A script uses the packages beside its own folder, and not an installed copy of them.
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
