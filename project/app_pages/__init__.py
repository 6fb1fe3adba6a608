"""The pages of the app, a file each; ``project/app.py`` shows them."""

import common  # noqa: F401 - it puts the packages beside this folder before installed copies
