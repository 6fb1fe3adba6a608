"""Attention composed of tensor operations, and its approximations."""

from .approximate.block_sparse import block_sparse
from .approximate.linear import linear
from .approximate.linformer import linformer
from .approximate.local import local
from .approximate.performer import performer
from .approximate.reformer import reformer
from .approximate.smyrf import smyrf

__all__ = ["block_sparse", "linear", "linformer", "local", "performer", "reformer", "smyrf"]
