"""The methods of a tensor, those of the published course and all others.

A starter tree before module 5 does not have this file, and its tensors have the methods of the course only.
"""

from __future__ import annotations

from .attention_methods import AttentionMethods
from .indexing_methods import IndexingMethods
from .interchange import Lending  # beyond module 5
from .operator_methods import TensorOperators
from .shape_methods import ShapeMethods


class Methods(
    AttentionMethods,
    IndexingMethods,
    Lending,  # beyond module 5
    ShapeMethods,
    TensorOperators,
):
    """Operators, shapes, attention, parts and choices by index, and exchange with other libraries."""
