"""Module 1: train a small network of Scalars, each weight a number with a derivative of its own.

python project/run_scalar.py                       points of "simple"
python project/run_scalar.py --DATASET xor

With the default options 48 of the 50 points of "simple", "split", "xor" and "circle" end on the right side,
and all of "diag"; it takes half a minute of one core.  "spiral" is beyond a network of this size.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence

from training.points import (
    LogFunction,
    add_training_options,
    default_log_fn,
    points_parser,
    run_points,
)

import minitorch
from minitorch import Scalar
from minitorch.datasets import Graph


class Linear(minitorch.Module):
    """Weighted sums of Scalars."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        # He's initialisation, as a uniform distribution: the signal neither fades nor grows from layer to
        # layer, and with a small positive bias hardly a ReLU is dead for all points from the start.
        limit = math.sqrt(6.0 / in_size)
        self.weights = [
            [
                self.add_parameter(f"weight_{i}_{j}", Scalar(random.uniform(-limit, limit)))
                for j in range(out_size)
            ]
            for i in range(in_size)
        ]
        self.bias = [self.add_parameter(f"bias_{j}", Scalar(0.1)) for j in range(out_size)]

    def forward(self, inputs: Sequence[Scalar]) -> list[Scalar]:
        """Return one Scalar for each output."""
        outputs = [bias.value for bias in self.bias]
        for x, row in zip(inputs, self.weights, strict=True):
            outputs = [
                output + x * weight.value for output, weight in zip(outputs, row, strict=True)
            ]
        return outputs


class Network(minitorch.Module):
    """Two hidden layers with ReLU, and the sigmoid of one output."""

    def __init__(self, hidden_layers: int) -> None:
        super().__init__()
        self.layer1 = Linear(2, hidden_layers)
        self.layer2 = Linear(hidden_layers, hidden_layers)
        self.layer3 = Linear(hidden_layers, 1)

    def forward(self, x: Sequence[Scalar]) -> Scalar:
        """Return the probability of class 1 at the point (x1, x2)."""
        middle = [h.relu() for h in self.layer1(x)]
        end = [h.relu() for h in self.layer2(middle)]
        return self.layer3(end)[0].sigmoid()


class ScalarTrain:
    """Train a network of Scalars, point by point."""

    def __init__(self, hidden_layers: int) -> None:
        self.hidden_layers = hidden_layers
        self.model = Network(hidden_layers)

    def run_one(self, x: Sequence[float]) -> Scalar:
        """Return the probability of class 1 at a point."""
        x1, x2 = (Scalar(value, name=f"x_{i + 1}") for i, value in enumerate(x))
        return self.model((x1, x2))

    def train(
        self,
        data: Graph,
        learning_rate: float,
        max_epochs: int = 500,
        log_fn: LogFunction = default_log_fn,
    ) -> None:
        """Train a new model: in each epoch one step along the gradient of the mean loss."""
        self.learning_rate, self.max_epochs = learning_rate, max_epochs
        self.model = Network(self.hidden_layers)
        losses: list[float] = []
        for epoch in range(1, max_epochs + 1):
            total_loss, correct = 0.0, 0
            for point, label in zip(data.X, data.y, strict=True):
                out = self.run_one(point)
                chosen = out if label == 1 else 1.0 - out  # probability of the point's own class
                correct += chosen.data > 0.5
                loss = -chosen.log()
                (loss / data.N).backward()  # adds to the derivatives of the points before
                total_loss += loss.data
            losses.append(total_loss)
            for p in self.model.parameters():  # a new number, whose derivative is still to come
                p.update(Scalar(p.value.data - learning_rate * (p.value.derivative or 0.0)))
            log_fn(epoch, total_loss, correct, losses)


def main(argv: list[str] | None = None) -> None:
    parser = points_parser(__doc__, "runs/scalar")
    add_training_options(parser, hidden=8, rate=0.3)

    def make_trainer(args: argparse.Namespace) -> ScalarTrain:
        return ScalarTrain(args.HIDDEN)

    run_points(make_trainer, parser.parse_args(argv))


if __name__ == "__main__":
    main()
