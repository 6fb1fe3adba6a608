"""An empty module; the published course has one of this name.

The layers are in ``modules_basic`` and ``transformer``, the base class is in ``module``.
"""
