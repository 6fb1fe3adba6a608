"""Several devices: groups of ranks, and attention over a sequence that is spread over them."""

from .agreement import check_same
from .data_parallel import GradientAverage, ShardedOptimizer
from .group import Grid, Group, Transfer, grid
from .model_parts import spread_sequence
from .mpi import MPIGroup, world
from .ring_attention import ring_attention
from .sequence_parts import positions

__all__ = [
    "GradientAverage",
    "Grid",
    "Group",
    "MPIGroup",
    "ShardedOptimizer",
    "Transfer",
    "check_same",
    "grid",
    "positions",
    "ring_attention",
    "spread_sequence",
    "world",
]
