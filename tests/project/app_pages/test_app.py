"""The app: every page shows, answers to its widgets, and tells of a call what the kernels did."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_scalar

import minitorch

streamlit = pytest.importorskip(
    "streamlit", reason='the app is not installed: pip install -e ".[app]"'
)
from app_pages import attention_page, block_recording, graph_page, ladder_page  # noqa: E402
from streamlit.testing.v1 import AppTest  # noqa: E402

ROOT = Path(__file__).parents[3]

PAGES = (
    "math", "manual", "autodiff", "scalar", "tensor", "gradients", "train", "fast", "block",
    "convolution", "attention", "ladder",
)  # fmt: skip


@pytest.fixture(autouse=True)
def command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the app what ``streamlit run project/app.py`` does, not the arguments of pytest."""
    monkeypatch.setattr(sys, "argv", ["app.py"])


def opened(page: str, **state: Any) -> AppTest:
    """Open a page, with some widgets set already."""
    app = AppTest.from_file(str(ROOT / "project" / "app.py"), default_timeout=60)
    app.query_params["page"] = page
    for name, value in state.items():
        app.session_state[key(app, name)] = value
    return ran(app)


def key(app: AppTest, name: str) -> str:
    """Return the key of a widget of the page that an app shows."""
    return f"{app.query_params['page']}.{name}"


def ran(app: AppTest) -> AppTest:
    """Run a page once more; it must not fail."""
    app.run()
    assert not app.exception, [error.stack_trace for error in app.exception]
    return app


def pictures(app: AppTest) -> list[str]:
    """Return an address for each picture of a page, which its content decides, and each chart."""
    # Of each pair of names, one is newer.
    found = [*app.get("image"), *app.get("imgs")]
    urls = [image.url for element in found for image in element.proto.imgs]  # type: ignore[attr-defined]
    charts = [*app.get("vega_lite_chart"), *app.get("arrow_vega_lite_chart")]
    return urls + [str(chart.proto) for chart in charts]  # type: ignore[attr-defined]


def contents(app: AppTest) -> list[str]:
    """Return what a step changes on a page: its pictures, counters, words and lines of the kernel."""
    counts = (f"{metric.value} {metric.delta}" for metric in app.metric)
    return [*pictures(app), *counts, *(x.value for x in (*app.code, *app.caption))]


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def dot(app: AppTest) -> str:
    return app.get("graphviz_chart")[0].proto.spec  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows(page: str) -> None:
    app = opened(page)
    assert app.title and not app.error and not app.warning
    assert pictures(app) or app.get("graphviz_chart")


def test_a_guide_keeps_the_brackets_of_its_code() -> None:
    app = opened("block")
    assert any("sum_blocks[2, THREADS](sums, " in text.value for text in app.markdown)


def test_a_module_has_its_own_pages_and_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def pages(*argv: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["app.py", *argv])
        return [option.split(" ")[0] for option in opened("math").sidebar.radio[0].options]

    assert set(pages("0")) == {"0"}
    assert set(pages("2", "--hide_function_defs")) == {"0", "1", "2"}
    assert len(pages()) == len(PAGES)


def test_pages_share_no_settings() -> None:
    app = opened("math", x=-1.0)
    app.sidebar.radio[0].set_value("autodiff")
    assert ran(app).slider(key(app, "x")).value == 2.0
    app = opened("train", rate=1.0, points=100)
    app.sidebar.radio[0].set_value("fast")
    assert ran(app).select_slider(key(app, "rate")).value == 0.1
    assert app.slider(key(app, "points")).value == 50


def test_a_slider_moves_the_point_on_the_curve() -> None:
    app = opened("math")
    before = pictures(app)
    app.slider(key(app, "x")).set_value(0.0)
    assert metrics(ran(app))["sigmoid at x = 0"] == "0.5"
    assert pictures(app) != before
    app.selectbox(key(app, "function")).set_value("lt")
    app.slider(key(app, "x")).set_value(1.0)
    assert metrics(ran(app))["lt at x = 1"] == "1", "1 is less than 2, the second argument"


@pytest.mark.parametrize("text", graph_page.EXAMPLES)
def test_the_graph_shows_the_derivatives_of_backward(text: str) -> None:
    app = opened("autodiff", example=text)
    bare = dot(app)
    app.slider(key(app, "done")).set_value(app.slider(key(app, "done")).max)
    assert dot(ran(app)) != bare
    values = {"x": 2.0, "y": 3.0, "z": -1.0}
    variables = {name: minitorch.Scalar(value, name=name) for name, value in values.items()}
    graph_page.evaluate(text, variables).backward()
    for name, variable in variables.items():
        shown = metrics(app)[f"derivative by {name}"]
        if variable.derivative is None:
            assert shown == "–"
        else:
            assert float(shown) == pytest.approx(variable.derivative, rel=1e-3)


@pytest.mark.parametrize(
    ("page", "text", "reason"),
    [
        ("autodiff", "x +", "no expression"),
        ("autodiff", "x.__class__", "not known here"),
        ("autodiff", "open('a')", "methods here"),
        ("autodiff", "w + 1", "w is not known here"),
        ("autodiff", "2 + 3", "no variable"),
        ("autodiff", "x / 0", "zero"),
        ("autodiff", "(x * 1000).exp()", "too large"),
        ("autodiff", "z ** 0.5", "not positive"),
        ("autodiff", "x ** y", "must be a number"),
        ("autodiff", "x * True", "no number"),
        ("autodiff", "x.exp(3)", "no argument"),
        ("autodiff", "x.sum(0)", "has no sum"),
        ("gradients", "x.sum(5)", "dim 5 does not exist"),
        ("gradients", "x.sum(y)", "whole number"),
        ("gradients", "x.sum(0, 1)", "one dimension"),
    ],
)
def test_an_expression_that_is_none_is_one_sentence(page: str, text: str, reason: str) -> None:
    assert reason in opened(page, example="my own", text=text).error[0].value


def test_an_error_shows_what_was_typed_and_no_markup() -> None:
    app = opened("autodiff", example="my own", text="*x* + <b>`$")
    assert r"\*x\* \+ \<b\>\`\$" in app.error[0].value


def test_edges_show_local_derivatives_and_a_variable_the_shares_that_meet_in_it() -> None:
    app = opened("autodiff", example="(x + y) * y")
    assert "∂ = 5" in dot(app) and "∂ = 3" in dot(app)
    app.slider(key(app, "done")).set_value(app.slider(key(app, "done")).max)
    shown = dot(ran(app))
    assert "1 · 3 = 3" in shown and ("d = 5 + 3 = 8" in shown or "d = 3 + 5 = 8" in shown)


#: Text that makes a file where it is run, as Python, as an expression of the app, or by a shell.
CODE = "__import__('pathlib').Path({!r}).touch()"


@pytest.mark.parametrize(
    "around", ["{}", "x * {}", "x.exp({})", "[{} for x in (1,)]", "f'{{{}}}'", "(lambda: {})()"]
)
def test_an_expression_runs_no_code(around: str, tmp_path: Path) -> None:
    text = around.format(CODE.format(str(tmp_path / "canary")))
    app = opened("autodiff", example="my own", text=text)
    assert app.error
    assert not (tmp_path / "canary").exists()


class _Canary:
    """What a pickle runs when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_files_that_are_looked_at_run_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record full of code is shown as text, and a pickle is no record."""
    folder, canary = tmp_path / "device", tmp_path / "canary"
    folder.mkdir()
    code = CODE.format(str(canary))
    text = f"<script>alert(1)</script><img src=x onerror=alert(1)> {code} $(touch {canary})"
    numbers = {"forward_ms": 1.0, "backward_ms": 2.0, "peak_mb": 3.0}
    record = {
        "device": text, "date": text, "command": text, "note": text, "batch": text, "heads": 1,
        "head_dim": 1, "causal": True, "rows": [{"length": n, "<b>flash2</b>": numbers} for n in (16, 32)],
    }  # fmt: skip
    (folder / "bench_attention.json").write_text(json.dumps(record))
    (folder / "bench_attention_more.json").write_bytes(pickle.dumps(_Canary(canary)))
    (folder / "conftest.py").write_text(code)
    monkeypatch.setattr(ladder_page, "RESULTS", tmp_path)
    ladder_page.measurements.clear()
    try:
        app = opened("ladder")
    finally:
        ladder_page.measurements.clear()
    assert text in app.caption[-1].value
    assert not any(element.proto.allow_html for element in (*app.markdown, *app.caption))
    assert app.warning[0].value.endswith("bench_attention_more")
    assert not canary.exists()


@pytest.mark.parametrize("missing", ["server.address", "server.allowedHosts"])
def test_an_app_that_others_can_reach_shows_nothing(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamlit, "get_option", lambda name: name != missing)
    app = opened("math")
    assert "localhost" in app.error[0].value
    assert not app.title


def test_an_index_says_where_in_the_storage() -> None:
    app = opened("tensor")
    before = pictures(app)
    for dim, index in enumerate((1, 2, 3)):
        app.slider(key(app, f"index{dim}")).set_value(index)
    assert metrics(ran(app))["position in the storage"] == "23"
    assert pictures(app) != before
    app = opened("tensor", order=(2, 0, 1))
    assert (metrics(app)["shape"], metrics(app)["strides"]) == ("(4, 2, 3)", "(1, 12, 4)")
    assert metrics(app)["shape of a + b"] == "(2, 3, 4)"
    assert opened("tensor", shape_a="2, 3", shape_b="4").error


@pytest.mark.parametrize("kernel", block_recording.KERNELS)
def test_a_block_shows_its_threads_and_the_race_without_a_barrier(kernel: str) -> None:
    first = block_recording.record(kernel, 8).moments[0].shared
    assert all(np.count_nonzero(~np.isnan(array)) == 1 for array in first.values())
    app = opened("block", block_kernel=kernel)
    app.button(key(app, "first")).click()
    before, table = pictures(ran(app)), app.dataframe[0].value
    assert list(table[""].str.contains("waits")).count(True) == 1
    app.button(key(app, "jump_next")).click()
    assert pictures(ran(app)) != before and not app.error
    barriers = app.selectbox(key(app, "without")).options[1:]
    assert len(barriers) == 2
    app.selectbox(key(app, "without")).set_value(int(barriers[0].split()[-1]))
    assert "a race on the shared array" in ran(app).error[0].value.replace("\\", "")


def test_the_window_of_a_convolution_moves() -> None:
    app = opened("convolution", kernel="shift")
    before = pictures(app)
    app.slider(key(app, "row")).set_value(1)
    assert metrics(ran(app))["output[1, 3]"] == "1", "the ring's pixel two rows and columns on"
    assert pictures(app) != before
    app.slider(key(app, "row")).set_value(7)
    assert metrics(ran(app))["output[7, 3]"] == "0", "beyond the edge"


def test_a_training_shows_a_picture_before_the_first_epoch_and_one_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs: list[int] = []

    def train(trainer: Any, data: Any, rate: float, last: int, log: Any) -> None:
        for epoch in epochs:
            log(epoch, 30.0, 17, [30.0] * epoch)
        streamlit.stop()

    monkeypatch.setattr(run_scalar.ScalarTrain, "train", train)
    app = opened("scalar", hidden=1, points=10)
    untrained = pictures(app)
    app.button(key(app, "train")).click()
    assert pictures(ran(app)) == untrained
    epochs.append(1)
    app.button(key(app, "train")).click()
    assert len(now := pictures(ran(app))) == 2, "the boundary, and the loss"
    assert now[0] not in untrained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "hidden", "least"),
    [
        ("scalar", 1, 5),
        ("train", 6, 15),
        ("fast", 6, 15),
    ],  # scalars are slow: one unit learns little
)
def test_a_training_learns_and_draws(page: str, hidden: int, least: int) -> None:
    app = opened(page, points=20, epochs=30, hidden=hidden, rate=0.5)
    before = pictures(app)
    app.button(key(app, "train")).click()
    assert int(metrics(ran(app))["right"].split()[0]) > least
    assert pictures(app) != before


def test_the_ladder_shows_what_was_measured() -> None:
    app = opened("ladder")
    before = pictures(app)
    app.selectbox(key(app, "quantity")).set_value("peak memory, MiB")
    app.selectbox(key(app, "device")).set_value("cpu-2-cores: bench_attention")
    ran(app)
    assert pictures(app) != before
    path = ROOT / "docs" / "results" / "cpu-2-cores" / "bench_attention.json"
    row = json.loads(path.read_text(encoding="utf-8"))["rows"][0]
    app.select_slider(key(app, "length")).set_value(row["length"])
    table = ran(app).dataframe[0].value
    shown = dict(zip(table[""], table["peak memory, MiB"], strict=True))
    assert shown["flash"] == row["flash"]["peak_mb"]


# -- attention -----------------------------------------------------------------------------------


def counted(app: AppTest) -> tuple[int, int]:
    reads, writes = (metrics(app)[f"elements {word}"] for word in ("read", "written"))
    return int(reads.replace(",", "")), int(writes.replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("rung", attention_page.RUNGS)
def test_a_step_changes_the_counters(rung: str) -> None:
    app = opened("attention", rung=rung, N=8, mask="none")
    app.button(key(app, "first")).click()
    seen, shown = [counted(ran(app))], [contents(app)]
    for _ in range(3):
        app.button(key(app, "next")).click()
        seen.append(counted(ran(app)))
        shown.append(contents(app))
    assert seen == sorted(seen) and len(set(seen)) > 1
    assert all(now != before for now, before in zip(shown[1:], shown, strict=False))
    app.button(key(app, "last")).click()
    assert counted(ran(app)) > seen[-1]
    assert " = " in app.caption[-1].value, "the count is not what the formula says"


def test_a_kernel_that_is_not_written_is_named_with_its_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_page, "recordings", lambda *settings: [])
    shown = opened("attention", rung="flash2").error[0].value.replace("\\", "")
    assert "flash2 is not written yet: it is task 5.7" in shown


def test_a_step_is_explained_and_every_number_of_its_tile_can_be_read() -> None:
    app = opened("attention", rung="flash2", mask="none", block_q=16, block_k=16, d=16)
    assert any(text.value.startswith("> ") and "maximum" in text.value for text in app.markdown)
    app.selectbox(key(app, "zoom")).set_value("S")
    assert ran(app).dataframe[0].value.shape == (16, 16)
