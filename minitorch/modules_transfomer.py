"""The transformer under the import path of the published course, which misspells it."""

from .transformer import DecoderLM, FeedForward, MultiHeadAttention, TransformerLayer

__all__ = ["DecoderLM", "FeedForward", "MultiHeadAttention", "TransformerLayer"]
