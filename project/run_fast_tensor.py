"""Module 3: train the network of module 2 with matrix products, in minibatches, on the fast backends.

python project/run_fast_tensor.py                            points of "simple"
python project/run_fast_tensor.py --DATASET xor --HIDDEN 100
python project/run_fast_tensor.py --BACKEND gpu

With the default options all 50 points of "simple" end on the right side and 49 of "xor"; with --HIDDEN 100
all 50 of "xor" and 49 of "split".  Each takes 5 to 10 seconds on two cores, once the kernels are compiled.
"""

from __future__ import annotations

import argparse

from run_tensor import Network, RParam, TensorTrain
from training.points import add_training_options, points_parser, run_points
from training.script_helpers import check_backend

import minitorch
from minitorch import Tensor

FastTensorBackend = minitorch.FastBackend
GPUBackend = minitorch.CudaBackend
BACKENDS = {"cpu": FastTensorBackend, "gpu": GPUBackend}
#: Points of one step.
BATCH = 10


class Linear(minitorch.Module):
    """Weighted sums, as a matrix product."""

    def __init__(
        self, in_size: int, out_size: int, backend: minitorch.TensorBackend = FastTensorBackend
    ) -> None:
        super().__init__()
        self.weights = RParam(in_size, out_size, backend=backend)
        self.bias = minitorch.Parameter(minitorch.full((out_size,), 0.1, backend))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, out_size) for (batch, in_size)."""
        return x @ self.weights.value + self.bias.value


class FastTrain(TensorTrain):
    """Train a network in minibatches."""

    batch_size = BATCH

    def __init__(
        self, hidden_layers: int, backend: minitorch.TensorBackend = FastTensorBackend
    ) -> None:
        self.backend = backend
        super().__init__(hidden_layers)

    def new_model(self) -> Network:
        """Return a network with fresh weights."""
        return Network(self.hidden_layers, self.backend, Linear)


def main(argv: list[str] | None = None) -> None:
    parser = points_parser(__doc__, "runs/fast_tensor")
    add_training_options(parser, hidden=10, rate=0.05)
    parser.choice("--BACKEND", BACKENDS, "cpu")

    def make_trainer(args: argparse.Namespace) -> FastTrain:
        check_backend(f"--BACKEND {args.BACKEND}", BACKENDS[args.BACKEND])
        return FastTrain(args.HIDDEN, BACKENDS[args.BACKEND])

    run_points(make_trainer, parser.parse_args(argv))


if __name__ == "__main__":
    main()
