"""What scripts of several rooms share: the command line, running scripts in turn."""

import sys
from pathlib import Path

# A script uses the packages beside its own folder, and not an installed copy of them.
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
