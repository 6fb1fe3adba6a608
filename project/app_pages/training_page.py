"""Modules 0 to 3: points of the plane, a classifier, and its decision boundary while it learns."""

from __future__ import annotations

import importlib
import random
import time

import numpy as np
import streamlit as st
from training.points import DATASETS, GRID, Trainer, boundary, count_correct
from training.script_helpers import Panel, curves

from app_pages.pictures import SIZE, png, show_panels
from app_pages.widgets import own
from minitorch.datasets import Graph

#: The part of the time that drawing may take.
SHARE = 1 / 3
#: Points along each side of the pictures drawn before the end of a training.
COARSE = 16


def choose_points() -> tuple[Graph, int]:
    """Show the choice of points; return them and the seed."""
    name = st.sidebar.selectbox("points", DATASETS, key=own("dataset"))
    count = st.sidebar.slider("number of points", 10, 150, 50, 10, key=own("points"))
    seed = st.sidebar.number_input("seed", 0, 1000, 0, key=own("seed"))
    set_seed(int(seed))
    return DATASETS[name](count), int(seed)


def set_seed(seed: int) -> None:
    """Seed every generator, as minitorch.manual_seed, which modules 0 and 1 have not."""
    random.seed(seed)
    np.random.seed(seed)


def manual_page(hide_source: bool = False) -> None:  # until module 0
    """Show the page of module 0: weights by hand."""
    script = importlib.import_module("run_manual")
    data, _ = choose_points()
    starts = zip(("w1", "w2", "b"), (*script.WEIGHTS, script.BIAS), st.columns(3), strict=True)
    *weights, bias = [
        column.slider(name, -20.0, 20.0, start, 0.5, key=own(name))
        for name, start, column in starts
    ]
    classifier = script.ManualTrain()
    classifier.set_weights(weights, bias)
    correct = count_correct(classifier, data)
    st.metric("right", f"{correct} of {data.N}")
    title = f"class 1 where {weights[0]:g} x1 + {weights[1]:g} x2 + {bias:g} > 0"
    show_panels(boundary(classifier, data, title), where=st.columns(2)[0])


def _training_page(  # beyond module 0
    script: str, kind: str, usual_rate: float = 0.3, first: str = "the first epoch runs"
) -> None:
    """Show the trainer of a script of the course, which its starter tree may lack.

    Args:
        script: The name of the script.
        kind: Its class of trainers.
        usual_rate: The learning rate at first.
        first: What the page says during the first epoch.
    """
    data, seed = choose_points()
    side = st.sidebar
    width = side.slider("hidden units", 1, 20, 8, key=own("hidden"))
    rates = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0)
    rate = side.select_slider("learning rate", rates, usual_rate, key=own("rate"))
    epochs = side.slider("epochs", 10, 500, 300, 10, key=own("epochs"))
    set_seed(seed)
    trainer: Trainer = getattr(importlib.import_module(script), kind)(width)
    metric, picture, bar = st.empty(), st.empty(), st.empty()

    def panel(epoch: int, correct: int, side: int) -> Panel:
        metric.metric("right", f"{correct} of {data.N}")
        return boundary(trainer, data, f"epoch {epoch}: {correct} of {data.N}", side)

    def draw(losses: list[float], epoch: int, correct: int, side: int) -> None:
        line = ("", range(1, len(losses) + 1), losses)
        loss = curves("epoch", "loss of all points, nats", line)
        show_panels(panel(epoch, correct, side), loss, where=picture)

    state, untrained = st.session_state, own("untrained")
    is_clicked = st.button("train", key=own("train"), type="primary")
    if not is_clicked or untrained not in state:
        state[untrained] = png(panel(0, count_correct(trainer, data), COARSE), SIZE, SIZE)
    # A picture that is there already: another one, of many scalars, would take seconds.
    picture.columns(2)[0].image(state[untrained])
    if not is_clicked:
        return
    bar.progress(0.0, f"{first} …")
    set_seed(seed)  # the first weights are those of the picture
    start, drawing, last = time.monotonic(), 0.0, list[float]()

    def log(epoch: int, total_loss: float, correct: int, losses: list[float]) -> None:
        nonlocal drawing
        last[:], now = losses, time.monotonic()
        bar.progress(epoch / epochs, f"epoch {epoch} of {epochs}, loss {total_loss:.3f}")
        if drawing <= SHARE * (now - start):
            draw(losses, epoch, correct, COARSE)
            drawing += time.monotonic() - now

    trainer.train(data, rate, epochs, log)
    seconds = time.monotonic() - start
    bar.progress(1.0, f"{epochs} epochs in {seconds:.1f} s, loss {last[-1]:.3f}")
    draw(last, epochs, count_correct(trainer, data), GRID)


def scalar_page(hide_source: bool = False) -> None:  # beyond module 0, until module 1
    """Show the page of module 1."""
    _training_page("run_scalar", "ScalarTrain")


def tensor_page(hide_source: bool = False) -> None:  # beyond module 1, until module 2
    """Show the page of module 2."""
    _training_page("run_tensor", "TensorTrain")


def fast_page(hide_source: bool = False) -> None:  # beyond module 2
    """Show the page of module 3."""
    _training_page("run_fast_tensor", "FastTrain", 0.1, "the first epoch compiles the loops")
