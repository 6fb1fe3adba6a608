"""Modules 0 to 3: points of the plane, a classifier, and its decision boundary while it learns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import streamlit as st
from run_fast_tensor import FastTrain
from run_manual import BIAS, WEIGHTS, ManualTrain
from run_scalar import ScalarTrain
from run_tensor import TensorTrain
from training.points import DATASETS, Trainer, boundary, count_correct
from training.script_helpers import curves

import minitorch
from app_pages.pictures import show_panels
from app_pages.widgets import choose
from minitorch.datasets import Graph

#: Seconds from one picture to the next while a training runs.
CADENCE = 0.7


def choose_points() -> Graph:
    """Show the choice of points; return them."""
    name = choose("points", DATASETS, "dataset", st.sidebar)
    count = st.sidebar.slider("number of points", 10, 150, 50, 10, key="points")
    seed = st.sidebar.number_input("seed", 0, 1000, 0, key="seed")
    minitorch.manual_seed(int(seed))
    return DATASETS[name](count)


def manual_page(hide_source: bool = False) -> None:
    """Show the page of module 0: weights by hand."""
    st.title("A linear classifier by hand")
    data = choose_points()
    starts = zip(("w1", "w2", "b"), (*WEIGHTS, BIAS), st.columns(3), strict=True)
    *weights, bias = [
        column.slider(name, -20.0, 20.0, start, 0.5, key=name) for name, start, column in starts
    ]
    classifier = ManualTrain()
    classifier.set_weights(weights, bias)
    correct = count_correct(classifier, data)
    st.metric("right", f"{correct} of {data.N}")
    title = f"class 1 where {weights[0]:g} x1 + {weights[1]:g} x2 + {bias:g} > 0"
    show_panels(boundary(classifier, data, title), where=st.columns(2)[0], size=5)


def _training_page(title: str, make: Callable[[int], Trainer], hidden: int, rate: float) -> None:
    st.title(title)
    data = choose_points()
    side = st.sidebar
    width = side.slider("hidden units", 1, 20, hidden, key="hidden")
    rates = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0)
    step = side.select_slider("learning rate", rates, rate, key="rate")
    epochs = side.slider("epochs", 10, 500, 200, 10, key="epochs")
    trainer = make(width)
    metric, picture, bar = st.empty(), st.empty(), st.empty()

    def draw(losses: list[float], epoch: int) -> None:
        correct = count_correct(trainer, data)
        metric.metric("right", f"{correct} of {data.N}")
        panels = [boundary(trainer, data, f"epoch {epoch}: {correct} of {data.N}")]
        if losses:
            line = ("", range(1, len(losses) + 1), losses)
            panels.append(curves("epoch", "loss of all points", line))
        show_panels(*panels, where=picture)

    if not st.button("train", key="train", type="primary"):
        draw([], 0)
        return
    last = [time.monotonic()]

    def log(epoch: int, total_loss: float, correct: int, losses: list[float]) -> None:
        bar.progress(epoch / epochs, f"epoch {epoch} of {epochs}, loss {total_loss:.3f}")
        if time.monotonic() - last[0] > CADENCE or epoch == epochs:
            draw(losses, epoch)
            last[0] = time.monotonic()

    trainer.train(data, step, epochs, log)


def scalar_page(hide_source: bool = False) -> None:
    """Show the page of module 1."""
    _training_page("A network of scalars", ScalarTrain, 4, 0.3)


def tensor_page(hide_source: bool = False) -> None:
    """Show the page of module 2."""
    _training_page("A network of tensors", TensorTrain, 4, 0.3)


def fast_page(hide_source: bool = False) -> None:
    """Show the page of module 3."""

    def make(width: int) -> Any:
        return FastTrain(width)

    _training_page("A network on the fast backend", make, 10, 0.05)
