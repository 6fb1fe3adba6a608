"""Attention composed of tensor operations, and its approximations."""

from .approximate.linear import linear
from .approximate.linformer import linformer
from .approximate.local import local
from .approximate.performer import performer
from .approximate.reformer import reformer
from .approximate.smyrf import smyrf

__all__ = ["linear", "linformer", "local", "performer", "reformer", "smyrf"]
