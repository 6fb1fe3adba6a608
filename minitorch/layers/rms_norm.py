"""RMS norm, the norm of Llama."""

from __future__ import annotations

from kernels.runtime.dtypes import is_floating

from ..backends.operations import operation  # beyond module 5
from ..functions.base import check_tensor
from ..modules_basic import Norm
from ..tensor import Tensor


class RMSNorm(Norm):
    """Divide the last dimension by its root mean square, then scale it.

    Args:
        dim: Length of the last dimension.
        eps: Added to the mean square.
        backend: Backend of the parameters.
        dtype: Dtype of the parameters; the default dtype when None.

    Source: Zhang and Sennrich (2019), Root mean square layer normalization.
    """

    bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, (…, dim); the result has the same shape."""
        return rms_norm(x, self.weights.value, self.eps)


@operation  # beyond module 5
def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Return RMS norm over the last dimension, in the dtype of x.

    Args:
        x: Input, (…, n).
        gamma: Factors, (n,).
        eps: Added to the mean square.

    Returns:
        (…, n).
    """
    check_tensor("input", x)
    x = x if is_floating(x.dtype) else x * 1.0  # the mean of integers is not an integer
    square = (x * x).mean(x.dims - 1)
    return (x / (square + eps) ** 0.5 * gamma).to(x.dtype)
