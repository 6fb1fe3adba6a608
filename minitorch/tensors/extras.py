"""The methods of a tensor that the published course does not have; starter trees have them from module 5 on."""

from __future__ import annotations

from .attention_methods import AttentionMethods
from .indexing_methods import IndexingMethods
from .interchange import Lending


class Extras(AttentionMethods, IndexingMethods, Lending):
    """Attention, parts and choices by index, and the exchange of elements with other libraries."""
