"""Module 2: train the network of module 1 on tensors, all points at once, in plain Python loops.

python project/run_tensor.py                       points of "simple"
python project/run_tensor.py --DATASET xor

The same seed draws the same weights as in module 1, and so ends with the same figures: 48 of the 50
points of "simple", "split", "xor" and "circle".  It takes three quarters of a minute of one core, longer
than with Scalars: a position of a tensor costs index arithmetic in Python.  Module 3 compiles it.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from typing import Any

from training.points import (
    LogFunction,
    add_training_options,
    default_log_fn,
    points_parser,
    run_points,
)

import minitorch
from minitorch import Tensor
from minitorch.datasets import Graph


def RParam(*shape: int, backend: minitorch.TensorBackend = minitorch.SimpleBackend) -> Any:
    """Return a parameter of random weights, of He's initialisation as in module 1."""
    limit = math.sqrt(6.0 / shape[0])
    return minitorch.Parameter((minitorch.rand(shape, backend) - 0.5) * (2.0 * limit))


class Linear(minitorch.Module):
    """Weighted sums, by broadcasting: nothing here is a matrix product yet."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        backend: minitorch.TensorBackend = minitorch.SimpleBackend,
    ) -> None:
        super().__init__()
        self.in_size, self.out_size = in_size, out_size
        self.weights = RParam(in_size, out_size, backend=backend)
        self.bias = minitorch.Parameter(minitorch.full((out_size,), 0.1, backend))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, out_size) for (batch, in_size)."""
        batch = x.shape[0]
        columns = x.view(batch, self.in_size, 1)
        products = columns * self.weights.value  # (batch, in_size, out_size)
        return products.sum(1).view(batch, self.out_size) + self.bias.value


class Network(minitorch.Module):
    """Two hidden layers with ReLU, and the sigmoid of one output."""

    def __init__(
        self,
        hidden: int,
        backend: minitorch.TensorBackend = minitorch.SimpleBackend,
        linear: Any = Linear,
    ) -> None:
        super().__init__()
        self.layer1 = linear(2, hidden, backend)
        self.layer2 = linear(hidden, hidden, backend)
        self.layer3 = linear(hidden, 1, backend)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, 1) probabilities of class 1 for (batch, 2) points."""
        middle = self.layer1(x).relu()  # (batch, hidden)
        end = self.layer2(middle).relu()  # (batch, hidden)
        return self.layer3(end).sigmoid()  # (batch, 1)


class TensorTrain:
    """Train a network of tensors on all points at once."""

    #: What computes, and the points of one step; None takes all of them.
    backend: minitorch.TensorBackend = minitorch.SimpleBackend
    batch_size: int | None = None

    def __init__(self, hidden_layers: int) -> None:
        self.hidden_layers = hidden_layers
        self.model = self.new_model()

    def new_model(self) -> Network:
        """Return a network with fresh weights."""
        return Network(self.hidden_layers, self.backend)

    def run_one(self, x: Sequence[float]) -> Tensor:
        """Return the probability of class 1 at a point, of shape (1, 1)."""
        return self.run_many([x])

    def run_many(self, X: Sequence[Sequence[float]]) -> Tensor:
        """Return (count, 1) probabilities of class 1."""
        return self.model(minitorch.tensor(X, self.backend))

    def train(
        self,
        data: Graph,
        learning_rate: float,
        max_epochs: int = 500,
        log_fn: LogFunction = default_log_fn,
    ) -> None:
        """Train a new model along the gradient of the mean loss of a batch."""
        self.learning_rate, self.max_epochs = learning_rate, max_epochs
        self.model = self.new_model()
        optim = minitorch.SGD(self.model.parameters(), learning_rate)
        batch_size = self.batch_size or data.N
        points = list(zip(data.X, data.y, strict=True))
        losses: list[float] = []
        for epoch in range(1, max_epochs + 1):
            total_loss, correct = 0.0, 0
            if batch_size < data.N:
                random.shuffle(points)
            for start in range(0, data.N, batch_size):
                X, labels = zip(*points[start : start + batch_size], strict=True)
                y = minitorch.tensor([[float(label)] for label in labels], self.backend)
                optim.zero_grad()
                out = self.run_many(X)  # (batch, 1)
                chosen = out * y + (1.0 - out) * (1.0 - y)  # probability of each point's own class
                loss = -chosen.log().sum()
                (loss / len(X)).backward()
                total_loss += loss.item()
                correct += int((chosen.to_numpy() > 0.5).sum())
                optim.step()
            losses.append(total_loss)
            log_fn(epoch, total_loss, correct, losses)


def main(argv: list[str] | None = None) -> None:
    parser = points_parser(__doc__, "runs/tensor")
    add_training_options(parser, hidden=8, rate=0.3)

    def make_trainer(args: argparse.Namespace) -> TensorTrain:
        return TensorTrain(args.HIDDEN)

    run_points(make_trainer, parser.parse_args(argv))


if __name__ == "__main__":
    main()
