"""Formulas as MathML: docutils translates them, and no script from a network is needed to draw them."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def _mathml(node: nodes.Element, source: str, as_block: bool) -> str:
    try:
        return latex2mathml.tex2mathml(source, as_block=as_block)
    except MathError as error:
        LOGGER.warning("the formula %s: %s", source, error, location=node)
        return ""


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_mathml(node, node.astext(), False))
    raise nodes.SkipNode


def _display(writer: Any, node: nodes.math_block) -> None:
    source = node.astext()
    if "\\\\" in source or "&" in source:
        source = f"\\begin{{aligned}}{source}\\end{{aligned}}"
    writer.body.append(f'<div class="math">{_mathml(node, source, True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Register the renderer under the name "mathml"."""
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
