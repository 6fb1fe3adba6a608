"""Several devices: groups of ranks, and attention over a sequence that is spread over them."""

from .group import Grid, Group, Transfer, grid
from .mpi import MPIGroup, world
from .ring_attention import ring_attention
from .sequence_parts import positions

__all__ = ["Grid", "Group", "MPIGroup", "Transfer", "grid", "positions", "ring_attention", "world"]
