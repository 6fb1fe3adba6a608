"""Formulas as MathML: docutils translates them, and no script from a network is needed to draw them."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
#: Between the name of a function and an operand without parentheses.
APPLY = "\N{FUNCTION APPLICATION}"
ElementTree.register_namespace("", NAMESPACE)


def _element(tag: str, *children: ElementTree.Element, **attributes: str) -> ElementTree.Element:
    element = ElementTree.Element(f"{{{NAMESPACE}}}{tag}", attributes)
    element.extend(children)
    return element


def mended(mathml: str) -> str:
    """Set a subscript beside a letter with an accent, not below it, and a space into ``log p``."""
    root = ElementTree.fromstring(mathml.replace("&ApplyFunction;", APPLY))
    for parent in list(root.iter()):
        for at, child in enumerate(list(parent)):
            after = parent[at + 1] if at + 1 < len(parent) else None
            if child.tag.endswith("}munderover") and child[2].get("stretchy") == "false":
                letter, below, accent = child
                over = _element("mover", letter, accent, accent="true")
                parent[at] = _element("msub", over, below)
            elif child.text == APPLY and after is not None and (after[:] or after.text != "("):
                parent[at] = _element("mspace", width="0.17em")
    return ElementTree.tostring(root, encoding="unicode")


def _mathml(node: nodes.Element, source: str, as_block: bool) -> str:
    try:
        return mended(latex2mathml.tex2mathml(source, as_block=as_block))
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
