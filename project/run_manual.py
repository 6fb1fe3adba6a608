"""Module 0: classify points with a linear model whose weights are set by hand.

python project/run_manual.py                                     the line that separates "simple"
python project/run_manual.py --DATASET diag --WEIGHTS -10 -10 --BIAS 5

Nothing is learnt here: the weights are yours.  The defaults put all points of "simple" on the right
side, the second line all points of "diag"; no line separates "split" or "xor".  Takes a second or two.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.command_line import NUMBER
from training.points import judge, make_points, points_parser
from training.script_helpers import ends_in_one_line, make_folder

import minitorch

#: Of "simple": class 1 lies where x1 < 0.5, that is where 5 - 10 x1 > 0.
WEIGHTS, BIAS = (-10.0, 0.0), 5.0


class Linear(minitorch.Module):
    """Weighted sums of plain numbers.

    The parameters are named ``weight_i_j``, from input i to output j, and ``bias_j``.
    """

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.weights = [
            [self.add_parameter(f"weight_{i}_{j}", 0.0) for j in range(out_size)]
            for i in range(in_size)
        ]
        self.bias = [self.add_parameter(f"bias_{j}", 0.0) for j in range(out_size)]

    def forward(self, inputs: Sequence[float]) -> list[float]:
        """Return one number for each output."""
        return [
            bias.value + sum(row[j].value * x for row, x in zip(self.weights, inputs, strict=True))
            for j, bias in enumerate(self.bias)
        ]


class Network(minitorch.Module):
    """A linear model of two inputs: the sigmoid of their weighted sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(2, 1)

    def forward(self, x: Sequence[float]) -> float:
        """Return the probability of class 1 at the point (x1, x2)."""
        return minitorch.operators.sigmoid(self.linear(x)[0])


class ManualTrain:
    """The model under the protocol of the trainers, without training."""

    def __init__(self, hidden_layers: int = 0) -> None:
        self.model = Network()
        self.set_weights(WEIGHTS, BIAS)

    def set_weights(self, weights: Sequence[float], bias: float) -> None:
        """Set the line: class 1 lies where weights · x + bias > 0."""
        for row, weight in zip(self.model.linear.weights, weights, strict=True):
            row[0].update(weight)
        self.model.linear.bias[0].update(bias)

    def run_one(self, x: Sequence[float]) -> float:
        """Return the probability of class 1 at a point."""
        return self.model(x)


def main(argv: list[str] | None = None) -> None:
    parser = points_parser(__doc__, "runs/manual")
    parser.add_argument(
        "--WEIGHTS", type=NUMBER, nargs=2, default=WEIGHTS, metavar=("W1", "W2"),
        help="(default: -10 0)",
    )  # fmt: skip
    parser.add_argument("--BIAS", type=NUMBER, default=BIAS, metavar="B", help="(default: 5)")
    args = parser.parse_args(argv)
    with ends_in_one_line("--PTS"):
        make_folder(args.out)
        classifier = ManualTrain()
        classifier.set_weights(args.WEIGHTS, args.BIAS)
        (w1, w2), b = args.WEIGHTS, args.BIAS
        print(f"class 1 where {w1:g} x1 + {w2:g} x2 + {b:g} > 0")
        data = make_points(args)
        for name, parameter in classifier.model.named_parameters():
            print(f"{name} = {parameter.value:g}")
        judge(classifier, data, args)


if __name__ == "__main__":
    main()
