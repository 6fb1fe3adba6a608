"""Module 4: train a small convolutional network, in the shape of LeNet, to read handwritten digits.

python project/run_digits.py                       scikit-learn's 1797 digits of 8 x 8 pixels
python project/run_digits.py --mnist FOLDER        MNIST's idx files, or an .npz file

On scikit-learn's digits it reads 99 % of the validation right, after some ten seconds on two cores;
compiling the kernels takes some more, once.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from common.command_line import COUNT, POSITIVE, PROBABILITY, script_parser
from data.digits import Images, read_mnist, sklearn_digits
from training.script_helpers import (
    Panel,
    Progress,
    check_backend,
    check_loss,
    curves,
    draw,
    ends_in_one_line,
    make_folder,
)
from training.script_helpers import learning_rate as schedule

import minitorch
from minitorch import Tensor

BACKENDS = {"cpu": minitorch.FastBackend, "gpu": minitorch.CudaBackend}
CLASSES = 10
#: Images that are judged at once.
JUDGED_AT_ONCE = 256

#: Epoch, loss, right and all of the validation, losses of the epochs, model.
LogFunction = Callable[[int, float, int, int, list[float], "Network"], None]


def default_log_fn(
    epoch: int, total_loss: float, correct: int, total: int, losses: list[float], model: Network
) -> None:
    """Print how far a training is."""
    print(f"epoch {epoch}  loss {total_loss:.4f}  validation {correct}/{total}")


class Conv2d(minitorch.Module):
    """Convolution of images, with a bias."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kh: int,
        kw: int,
        backend: minitorch.TensorBackend,
    ) -> None:
        super().__init__()
        limit = math.sqrt(6.0 / (in_channels * kh * kw))  # He, as in the modules before
        shape = (out_channels, in_channels, kh, kw)
        noise = minitorch.rand(shape, backend, dtype=np.float32)
        self.weights = minitorch.Parameter((noise - 0.5) * (2.0 * limit))
        zeros = minitorch.zeros((1, out_channels, 1, 1), backend, dtype=np.float32)
        self.bias = minitorch.Parameter(zeros)

    def forward(self, input: Tensor) -> Tensor:
        """Return (batch, out_channels, height, width) for (batch, in_channels, height, width)."""
        return minitorch.conv2d(input, self.weights.value) + self.bias.value


class Network(minitorch.Module):
    """Two convolutions, a pooling, two linear layers, the logarithm of softmax."""

    def __init__(
        self,
        height: int = 8,
        width: int = 8,
        hidden: int = 64,
        dropout: float = 0.25,
        backend: minitorch.TensorBackend = minitorch.FastBackend,
    ) -> None:
        super().__init__()
        self.pool = 4 if min(height, width) > 16 else 2
        if height % self.pool or width % self.pool:
            raise ValueError(
                f"images of {height} x {width} pixels cannot be pooled by {self.pool}; crop or pad "
                "them to a multiple of it"
            )
        self.conv1 = Conv2d(1, 4, 3, 3, backend)
        self.conv2 = Conv2d(4, 8, 3, 3, backend)
        self.flat = 8 * (height // self.pool) * (width // self.pool)
        self.linear1 = minitorch.Linear(self.flat, hidden, backend=backend, dtype=np.float32)
        self.linear2 = minitorch.Linear(hidden, CLASSES, backend=backend, dtype=np.float32)
        self.dropout = minitorch.Dropout(dropout)
        #: What the second convolution returned at the last call, for pictures.
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, 10) logarithms of probabilities for (batch, 1, height, width) images."""
        x = self.conv1(x).relu()  # (batch, 4, height, width)
        x = self.features = self.conv2(x).relu()  # (batch, 8, height, width)
        x = minitorch.maxpool2d(x, (self.pool, self.pool))  # (batch, 8, height/pool, width/pool)
        x = self.linear1(x.view(x.shape[0], self.flat)).relu()  # (batch, hidden)
        return minitorch.logsoftmax(self.linear2(self.dropout(x)), 1)  # (batch, 10)


class ImageTrain:
    """Train a network on images."""

    def __init__(
        self,
        make_model: Callable[[], Network] = Network,
        backend: minitorch.TensorBackend = minitorch.FastBackend,
        batch_size: int = 16,
        seed: int = 0,
    ) -> None:
        self.make_model, self.backend, self.batch_size = make_model, backend, batch_size
        self.rng = np.random.default_rng(seed)
        self.model = make_model()

    def run_one(self, x: Any) -> Tensor:
        """Return (1, 10) logarithms of the classes' probabilities for one (height, width) image."""
        return self.run_many(np.asarray(x)[None])

    def run_many(self, X: Any) -> Tensor:
        """Return (count, 10) logarithms of probabilities for (count, height, width) images."""
        array = np.ascontiguousarray(X, np.float32)[:, None]
        return self.model(minitorch.from_numpy(array, self.backend))

    def predict(self, X: Any) -> npt.NDArray[np.float32]:
        """Return what ``run_many`` does, as an array, in evaluation mode."""
        self.model.eval()
        parts = [
            self.run_many(X[i : i + JUDGED_AT_ONCE]).to_numpy()
            for i in range(0, len(X), JUDGED_AT_ONCE)
        ]
        self.model.train()
        return np.concatenate(parts)

    def train(
        self,
        data_train: Images,
        data_val: Images,
        learning_rate: float,
        max_epochs: int = 15,
        log_fn: LogFunction = default_log_fn,
    ) -> None:
        """Train a new model with Adam; after each epoch report the validation."""
        self.model = self.make_model()
        optim = minitorch.Adam(self.model.parameters(), learning_rate)
        count, losses = len(data_train.y), []
        steps = math.ceil(count / self.batch_size)
        for epoch in range(1, max_epochs + 1):
            total_loss, order = 0.0, self.rng.permutation(count)
            for step in range(steps):
                progress = (epoch - 1 + step / steps) / max_epochs
                optim.lr = schedule(progress, learning_rate)
                rows = order[step * self.batch_size : (step + 1) * self.batch_size]
                optim.zero_grad()
                loss = self.loss(data_train.X[rows], data_train.y[rows])
                (loss / len(rows)).backward()
                optim.step()
                total_loss += loss.item()
            losses.append(total_loss / count)
            correct = int((self.predict(data_val.X).argmax(1) == data_val.y).sum())
            log_fn(epoch, losses[-1], correct, len(data_val.y), losses, self.model)

    def loss(self, X: Any, y: npt.NDArray[np.int64]) -> Tensor:
        """Return the sum of -log p of the images' own classes, of shape (1,)."""
        chosen = np.eye(CLASSES, dtype=np.float32)[y]  # (count, 10)
        return -(self.run_many(X) * minitorch.from_numpy(chosen, self.backend)).sum()


def samples(data: Images, predicted: npt.NDArray[np.int64]) -> Panel:
    """Return a panel of validation images with what the model reads: the wrong ones first."""
    order = np.argsort(predicted == data.y, kind="stable")[:20]

    def panel(axes: Any) -> None:
        height, width = data.X.shape[1:]
        gap = height // 3  # above each image, for the text
        sheet = np.zeros((4 * (height + gap), 5 * (width + gap)))
        for place, i in enumerate(order):
            row, column = place // 5 * (height + gap), place % 5 * (width + gap)
            sheet[row + gap : row + gap + height, column : column + width] = data.X[i]
            wrong = predicted[i] != data.y[i]
            text = f"{predicted[i]}, is {data.y[i]}" if wrong else f"{predicted[i]}"
            axes.text(column, row, text, fontsize=8, va="top",
                      color="#f87171" if wrong else "#86efac")  # fmt: skip
        axes.imshow(sheet, cmap="gray")
        axes.set(title="validation: what the model reads, wrong ones first")
        axes.axis("off")

    return panel


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "runs/digits")
    parser.add_argument(
        "--mnist", metavar="PATH",
        help="folder of MNIST's four idx files, or an .npz file (default: scikit-learn's digits)",
    )  # fmt: skip
    parser.option("--train", COUNT, 5000, "images to learn from, at most")
    parser.option("--val", COUNT, 500, "images to judge by, at most")
    parser.option("--EPOCHS", COUNT, 15, "passes over the images")
    parser.option("--BATCH", COUNT, 16, "images of one step")
    parser.option("--HIDDEN", COUNT, 64, "width of the linear layer")
    parser.option("--RATE", POSITIVE, 0.005, "highest learning rate")
    parser.option("--dropout", PROBABILITY, 0.25, "share that is dropped")
    parser.choice("--BACKEND", BACKENDS, "cpu")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    backend = BACKENDS[args.BACKEND]
    check_backend(f"--BACKEND {args.BACKEND}", backend)
    out = make_folder(args.out)
    minitorch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    train, held_out = read_mnist(args.mnist) if args.mnist else sklearn_digits(rng)
    train, held_out = train.first(args.train), held_out.first(args.val)
    height, width = train.X.shape[1:]

    def make_model() -> Network:
        return Network(height, width, args.HIDDEN, args.dropout, backend)

    try:
        trainer = ImageTrain(make_model, backend, args.BATCH, args.seed)
    except ValueError as error:
        sys.exit(str(error))
    weights = sum(p.value.size for p in trainer.model.parameters())
    print(f"{len(train.y)} images to learn from, {len(held_out.y)} to judge by, {height} x {width} "
          f"pixels; model {weights:,} weights")  # fmt: skip
    accuracy: list[float] = []
    curve: list[float] = []
    with Progress(args.EPOCHS, "epoch") as progress:

        def log(
            epoch: int, loss: float, correct: int, total: int, losses: list[float], _: Any
        ) -> None:
            check_loss(loss, f"the loss of epoch {epoch}", args.RATE, "--RATE")
            curve[:] = losses
            accuracy.append(correct / total)
            progress.update(
                epoch, f"loss {loss:.4f}  validation {correct}/{total}  {progress.speed}"
            )

        trainer.train(train, held_out, args.RATE, args.EPOCHS, log)
    predicted = trainer.predict(held_out.X).argmax(1)
    correct = int((predicted == held_out.y).sum())
    print(f"trained {progress.done} epochs in {progress.seconds:.1f} s, {progress.speed}\n"
          f"validation accuracy {correct / len(predicted):.1%}, {correct} of {len(predicted)}")  # fmt: skip
    epochs = range(1, len(curve) + 1)
    draw(out / "digits.png",
         curves("epoch", "loss, and share of the validation that is right",
                ("training loss", epochs, curve), ("validation accuracy", epochs, accuracy)),
         samples(held_out, predicted))  # fmt: skip
    progress.end()


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with ends_in_one_line("--BATCH or --HIDDEN"):
        run(args)


if __name__ == "__main__":
    main()
