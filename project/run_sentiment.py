"""Module 4: train Kim's convolutional network to tell the sentiment of a sentence.

python project/run_sentiment.py                            sentences made by a rule, see sentiment_data.py
python project/run_sentiment.py --data train.tsv           lines of a sentence, a tab, and 0 or 1
python project/run_sentiment.py --data train.tsv --embeddings glove.6B.50d.txt

On the sentences made by a rule it gets 93.6 % of the validation right, of the 95 % that are possible, after
some ten seconds on two cores; a linear bag of words, trained beside it, gets no more than 72.5 % of many.

Source: Kim (2014), Convolutional Neural Networks for Sentence Classification.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from common.command_line import COUNT, POSITIVE, PROBABILITY, script_parser
from data.sentiment import (
    BEST_ACCURACY,
    BEST_LOSS,
    BEST_OF_A_BAG,
    Sentences,
    encode,
    make_sentence,
    read_sentences,
    read_vectors,
    vocabulary,
)
from training.script_helpers import (
    Progress,
    check_backend,
    check_loss,
    curves,
    draw,
    ends_in_one_line,
    make_folder,
)

import minitorch
from minitorch import Tensor

BACKENDS = {"cpu": minitorch.FastBackend, "gpu": minitorch.CudaBackend}
FILTER_SIZES = (3, 4, 5)
#: Longer sentences are cut.
MAX_LENGTH = 60
#: Sentences that are judged at once.
JUDGED_AT_ONCE = 100

Floats = npt.NDArray[np.float32]
#: Epoch, mean loss, losses of the epochs, probabilities and accuracy of training, and of validation.
LogFunction = Callable[[int, float, list[float], Floats, float, Floats, float], None]


def default_log_fn(
    epoch: int, train_loss: float, losses: list[float],
    train_predictions: Floats, train_accuracy: float,
    validation_predictions: Floats, validation_accuracy: float,
) -> None:  # fmt: skip
    """Print how far a training is."""
    print(f"epoch {epoch}  loss {train_loss:.4f}  training {train_accuracy:.1%}  "
          f"validation {validation_accuracy:.1%}")  # fmt: skip


class Conv1d(minitorch.Module):
    """Convolution along a sentence, with a bias."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_width: int,
        backend: minitorch.TensorBackend = minitorch.FastBackend,
    ) -> None:  # fmt: skip
        super().__init__()
        limit = math.sqrt(6.0 / (in_channels * kernel_width))  # He, for a ReLU follows
        shape = (out_channels, in_channels, kernel_width)
        noise = minitorch.rand(shape, backend, dtype=np.float32)
        self.weights = minitorch.Parameter((noise - 0.5) * (2.0 * limit))
        zeros = minitorch.zeros((1, out_channels, 1), backend, dtype=np.float32)
        self.bias = minitorch.Parameter(zeros)

    def forward(self, input: Tensor) -> Tensor:
        """Return (batch, out_channels, length) for (batch, in_channels, length)."""
        return minitorch.conv1d(input, self.weights.value) + self.bias.value


class CNNSentimentKim(minitorch.Module):
    """Convolutions of three widths, each with the maximum over the sentence, and a linear layer."""

    def __init__(
        self,
        feature_map_size: int = 100,
        embedding_size: int = 50,
        filter_sizes: Sequence[int] = FILTER_SIZES,
        dropout: float = 0.25,
        backend: minitorch.TensorBackend = minitorch.FastBackend,
    ) -> None:
        super().__init__()
        self.maps = feature_map_size
        narrow, middle, wide = filter_sizes
        self.conv1 = Conv1d(embedding_size, feature_map_size, narrow, backend)
        self.conv2 = Conv1d(embedding_size, feature_map_size, middle, backend)
        self.conv3 = Conv1d(embedding_size, feature_map_size, wide, backend)
        self.dropout = minitorch.Dropout(dropout)
        self.linear = minitorch.Linear(feature_map_size, 1, backend=backend, dtype=np.float32)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return (batch,) probabilities for (batch, length, embedding_size) vectors of words."""
        batch = embeddings.shape[0]
        x = embeddings.permute(0, 2, 1).contiguous()  # (batch, embedding_size, length)
        first, second, third = (
            minitorch.max(conv(x).relu(), 2) for conv in (self.conv1, self.conv2, self.conv3)
        )  # (batch, maps, 1)
        features = self.dropout((first + second + third).view(batch, self.maps))
        return self.linear(features).sigmoid().view(batch)


class WordNetwork(minitorch.Module):
    """A network of vectors of words, with the table of these vectors."""

    def __init__(
        self, network: minitorch.Module, count: int, dimension: int, vectors: Floats | None = None,
        backend: minitorch.TensorBackend = minitorch.FastBackend,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vectors, self.backend = vectors, backend
        if vectors is None:
            self.words = minitorch.Embedding(count, dimension, backend, np.float32, std=0.5)
        self.network = network

    def forward(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Return (batch,) probabilities for (batch, length) ids of words."""
        if self.vectors is None:
            return self.network(self.words(ids))
        return self.network(minitorch.from_numpy(self.vectors[ids], self.backend))


class BagOfWords(minitorch.Module):
    """A linear model of which words are there: for comparison, since it cannot see their order."""

    def __init__(
        self, count: int, backend: minitorch.TensorBackend = minitorch.FastBackend
    ) -> None:
        super().__init__()
        self.scores = minitorch.Embedding(count, 1, backend, np.float32, std=0.01)
        self.bias = minitorch.Parameter(minitorch.zeros((1,), backend, dtype=np.float32))

    def forward(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Return (batch,) probabilities for (batch, length) ids of words."""
        total = self.scores(ids).sum(1)  # (batch, 1, 1)
        return (total.view(len(ids)) + self.bias.value).sigmoid()


class SentenceSentimentTrain:
    """Train a model of sentences."""

    def __init__(
        self, model: Any, backend: minitorch.TensorBackend = minitorch.FastBackend
    ) -> None:
        self.model, self.backend = model, backend

    def run_many(self, X: npt.NDArray[np.int64]) -> Tensor:
        """Return (count,) probabilities of a positive sentiment."""
        return self.model(X)

    def predict(self, X: npt.NDArray[np.int64]) -> Floats:
        """Return what ``run_many`` does, as an array, in evaluation mode."""
        self.model.eval()
        starts = range(0, len(X), JUDGED_AT_ONCE)
        parts = [self.run_many(X[i : i + JUDGED_AT_ONCE]).to_numpy() for i in starts]
        self.model.train()
        return np.concatenate(parts)

    def train(
        self,
        data_train: Sentences,
        learning_rate: float,
        batch_size: int = 10,
        max_epochs: int = 10,
        data_val: Sentences | None = None,
        log_fn: LogFunction = default_log_fn,
    ) -> None:
        """Train the model with Adam; after each epoch report training and validation."""
        optim = minitorch.Adam(self.model.parameters(), learning_rate)
        order, losses = list(range(len(data_train.y))), []
        data_val = data_val or data_train
        for epoch in range(1, max_epochs + 1):
            random.shuffle(order)
            total_loss, seen = 0.0, np.zeros(len(order), np.float32)
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                optim.zero_grad()
                out = self.run_many(data_train.X[rows])  # (batch,)
                loss = self.loss(out, data_train.y[rows])
                (loss / len(rows)).backward()
                optim.step()
                total_loss += loss.item()
                seen[rows] = out.to_numpy()
            losses.append(total_loss / len(order))
            predicted = self.predict(data_val.X)
            log_fn(epoch, losses[-1], losses, seen, accuracy(seen, data_train),
                   predicted, accuracy(predicted, data_val))  # fmt: skip

    def loss(self, out: Tensor, y: npt.NDArray[np.int64]) -> Tensor:
        """Return the sum of -log p of the sentences' own labels, of shape (1,)."""
        label = minitorch.from_numpy(y.astype(np.float32), self.backend)  # (batch,)
        return -(out * label + (1.0 - out) * (1.0 - label)).log().sum()


def accuracy(predicted: Floats, data: Sentences) -> float:
    """Return the share of sentences on the right side of one half."""
    return float(((predicted > 0.5) == data.y).mean())


# -- the script ----------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "runs/sentiment")
    add = parser.add_argument
    add("--data", metavar="FILE", help="lines of a sentence, a tab, and 0 or 1")
    add("--embeddings", metavar="FILE", help="lines of a word and numbers, which are not trained")
    parser.option("--train", COUNT, 1500, "sentences to learn from, at most")
    parser.option("--val", COUNT, 500, "sentences to judge by, at most")
    parser.option("--EPOCHS", COUNT, 6, "passes over the sentences")
    parser.option("--BATCH", COUNT, 10, "sentences of one step")
    parser.option("--MAPS", COUNT, 32, "feature maps of each width")
    parser.option("--dimension", COUNT, 16, "length of a word's vector, where it is learnt")
    parser.option("--RATE", POSITIVE, 0.003, "learning rate")
    parser.option("--dropout", PROBABILITY, 0.25, "share that is dropped")
    parser.choice("--BACKEND", BACKENDS, "cpu")
    return parser.parse_args(argv)


def load(args: argparse.Namespace) -> tuple[Sentences, Sentences, dict[str, int]]:
    """Return sentences for training and for validation, and the vocabulary."""
    if args.data:
        pairs = read_sentences(args.data)
        random.shuffle(pairs)
        if len(pairs) < 2:
            sys.exit(f"--data {args.data} has {len(pairs)} sentences; at least 2 are needed")
        val = min(args.val, len(pairs) // 2)
    else:
        pairs, val = [make_sentence() for _ in range(args.train + args.val)], args.val
    train = pairs[val : val + args.train]
    words = vocabulary([sentence for sentence, _ in train])
    longest = max(len(sentence.split()) for sentence, _ in train)
    length = min(max(longest, *FILTER_SIZES), MAX_LENGTH)
    return encode(train, words, length), encode(pairs[:val], words, length), words


def fit(
    name: str, model: Any, train: Sentences, held_out: Sentences, args: argparse.Namespace
) -> tuple[Progress, list[float], list[float]]:
    """Train a model, print its figures; return how far it came, the losses and the accuracies."""
    trainer = SentenceSentimentTrain(model, BACKENDS[args.BACKEND])
    curve: list[float] = []
    right: list[float] = []
    with Progress(args.EPOCHS, "epoch") as progress:

        def log(epoch: int, loss: float, losses: list[float], *judged: Any) -> None:
            check_loss(loss, f"the loss of epoch {epoch}", args.RATE, "--RATE")
            curve[:] = losses
            right.append(judged[3])
            progress.update(
                epoch, f"loss {loss:.4f}  training {judged[1]:.1%}  validation {judged[3]:.1%}"
            )

        trainer.train(train, args.RATE, args.BATCH, args.EPOCHS, held_out, log)
    predicted = trainer.predict(held_out.X)
    own = np.where(held_out.y == 1, predicted, 1.0 - predicted)  # probabilities of the labels
    print(
        f"{name}: validation accuracy {accuracy(predicted, held_out):.1%}, "
        f"loss {-np.log(np.maximum(own, 1e-6)).mean():.3f}; "
        f"{progress.done} epochs in {progress.seconds:.1f} s\n"
    )
    return progress, curve, right


def run(args: argparse.Namespace) -> None:
    backend = BACKENDS[args.BACKEND]
    check_backend(f"--BACKEND {args.BACKEND}", backend)
    out = make_folder(args.out)
    minitorch.manual_seed(args.seed)
    train, held_out, words = load(args)
    vectors = read_vectors(args.embeddings, words) if args.embeddings else None
    dimension = args.dimension if vectors is None else vectors.shape[1]
    count = len(words) + 1
    print(
        f"{len(train.y)} sentences to learn from, {len(held_out.y)} to judge by, {count - 1} words"
    )
    for text, label in zip(train.texts[:3], train.y, strict=False):
        print(f"  {'good' if label else 'bad ':4}  {text:.90}")
    print("\nlinear bag of words, for comparison")
    bag, _, bag_right = fit("bag of words", BagOfWords(count, backend), train, held_out, args)
    bag.end()
    print("convolutional network")
    cnn = CNNSentimentKim(args.MAPS, dimension, FILTER_SIZES, args.dropout, backend)
    model = WordNetwork(cnn, count, dimension, vectors, backend)
    progress, losses, right = fit("convolutional network", model, train, held_out, args)
    if not args.data:
        print(
            f"over all sentences the best possible accuracy is {BEST_ACCURACY:.1%}, at a loss of "
            f"{BEST_LOSS:.3f}; of a bag of words {BEST_OF_A_BAG:.1%}"
        )
    epochs, all_epochs = range(1, len(right) + 1), range(1, len(bag_right) + 1)
    draw(out / "sentiment.png",
         curves("epoch", "training loss, nats per sentence", ("", epochs, losses)),
         curves("epoch", "validation accuracy", ("convolutional network", epochs, right),
                ("bag of words", all_epochs, bag_right),
                optimum=None if args.data else BEST_ACCURACY))  # fmt: skip
    progress.end()


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with ends_in_one_line("--BATCH, --MAPS or --dimension"):
        run(args)


if __name__ == "__main__":
    main()
