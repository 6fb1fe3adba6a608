"""The options of attention for CUDA, common to all rungs."""
