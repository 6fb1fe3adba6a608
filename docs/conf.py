"""Configuration of the site: Sphinx with MyST-NB, built offline; see ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PROJECT = DOCS.parent / "project"
sys.path[:0] = [str(DOCS.parent), str(PROJECT), str(DOCS), str(DOCS / "extensions")]

project = "minitorch-flash"
author = "The minitorch-flash authors"
_SOURCE = (DOCS.parent / "minitorch" / "__init__.py").read_text(encoding="utf-8")
(release,) = re.findall(r'^__version__ = "(.+)"$', _SOURCE, re.MULTILINE)
project_copyright = author
html_title = project
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "docstrings",  # from here on, extensions of docs/extensions
    "mathml",
    "tasks",
    "algorithm",
    "glossary_of_records",
    "measured",
]
exclude_patterns = ["_build"]
suppress_warnings = ["docutils.directive_order"]

# Markdown
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4  # links such as page.md#a-heading, as on GitHub

# Cells of docs/notebooks run at each build, in a folder of their own.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

# Docstrings are Google's.  Types stand in the signatures, and are not links.
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
# The site is built without PyTorch.
_OPERATOR = "kernels.interop.torch"
autodoc_mock_imports = ["torch", f"{_OPERATOR}.custom_operators", f"{_OPERATOR}.eager"]
python_maximum_signature_line_length = 100  # of a longer one each parameter has a line
default_role = "code"  # `x` in a docstring is code, as in Markdown
strip_signature_backslash = True  # so that napoleon keeps the underscore of a name such as compile_
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Formulas as MathML, which browsers draw themselves: no script and nothing from a network.
html_math_renderer = "mathml"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
