"""The app: see the course's parts at work, module by module, up to a kernel's tiles.

streamlit run project/app.py                      every page
streamlit run project/app.py -- 2                 the pages of modules 0 to 2
streamlit run project/app.py -- 5 --hide_function_defs

Only this machine gets an answer, under its own names, as .streamlit/config.toml says.  Files are shown, and
no code of theirs is run.
The last is for a lesson: the attention page then shows no source.  ``?page=attention`` opens one page.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NamedTuple

import streamlit as st
from app_pages.guide import show_guide
from app_pages.widgets import refuse

LAST_MODULE = 5


class Page(NamedTuple):
    """One entry of the sidebar."""

    module: int  # of the course
    title: str  # in the sidebar, and above the page
    #: The file in ``app_pages`` and the function that shows the page; it takes whether to hide source.
    place: tuple[str, str]
    about: str  # what the page shows and what to try
    guide: tuple[str, str]  # the page of the guide and the section that the page belongs to


#: By the name in the address.
PAGES = {
    "math": Page(  # until module 0
        0, "Math sandbox", ("math_page", "page"),
        "The functions of `operators` as curves, `map`, `zipWith` and `reduce` on a list of "
        "numbers, and the names of the parameters in a tree of modules. Move a slider and look at "
        "the point on the curve.",
        ("module0", "Task 0.1"),
    ),
    "manual": Page(  # until module 0
        0, "Classify by hand", ("training_page", "manual_page"),
        "A linear model with two weights and a bias. The black line is where its sum is 0. "
        "Separate each data set with the three sliders, and find those that no line separates.",
        ("module0", "Try it"),
    ),
    "autodiff": Page(  # beyond module 0, until module 1
        1, "Scalar graph and autodiff", ("graph_page", "scalar_page"),
        "An expression as a graph: boxes are variables, ellipses are functions. Each edge into a "
        "function has the function's local derivative. Move the slider, and derivatives flow back "
        "along the edges.",
        ("module1", "Task 1.3"),
    ),
    "scalar": Page(  # beyond module 0, until module 1
        1, "Train with scalars", ("training_page", "scalar_page"),
        "The training of `project/run_scalar.py`. Colours show the predicted class, and the black "
        "line is the boundary between the two classes.",
        ("module1", "Task 1.5"),
    ),
    "tensor": Page(  # beyond module 1, until module 2
        2, "Tensor strides and views", ("tensor_page", "page"),
        "One storage under a view. Permute the dimensions: shape and strides change, and the "
        "storage does not. Below, the shape that two shapes broadcast to.",
        ("module2", "Task 2.1"),
    ),
    "gradients": Page(  # beyond module 5
        2, "Tensor graph and autodiff", ("graph_page", "tensor_page"),
        "The graph of an expression of tensors, with shapes. A gradient has the shape of its "
        "variable: where a variable was broadcast, the gradient is summed.",
        ("module2", "Task 2.4"),
    ),
    "train": Page(  # beyond module 1, until module 2
        2, "Train with tensors", ("training_page", "tensor_page"),
        "The training of `project/run_tensor.py`, all points at once, in plain Python loops.",
        ("module2", "Task 2.5"),
    ),
    "fast": Page(  # beyond module 2, until module 3
        3, "Train on the fast backend", ("training_page", "fast_page"),
        "The training of `project/run_fast_tensor.py` with compiled loops. Compare its time with "
        "module 2.",
        ("module3", "Task 3.5"),
    ),
    "block": Page(  # beyond module 2, until module 3
        3, "A block, thread by thread", ("block_page", "page"),
        "Your kernels of tasks 3.3 and 3.4 ran on the emulated GPU, which lets the threads of a block "
        "run in any order. A step ends where a thread reaches a barrier: what it has written into shared "
        "memory has a frame. Leave out a barrier, and read which threads then race.",
        ("module3", "Task 3.3"),
    ),
    "convolution": Page(  # beyond module 3, until module 4
        4, "Convolution and pooling", ("conv_page", "page"),
        "One element of the output is the sum of a window of the input times the kernel. Move the "
        "window, and change the kernel.",
        ("module4", "Task 4.2"),
    ),
    "attention": Page(  # beyond module 4
        5, "Attention, tile by tile", ("attention_page", "page"),
        "A kernel of `kernels/cuda` ran on the emulated GPU. At each barrier its shared memory "
        "and registers were recorded, and its global arrays counted the elements read and "
        "written. Go through the steps. You write these kernels in tasks 5.4 to 5.7 and 5.9.",
        ("module5", "Task 5.3"),
    ),
    "ladder": Page(  # beyond module 5
        5, "The ladder, measured", ("ladder_page", "page"),
        "The times and the memory of each implementation of attention, as measured on several "
        "devices.",
        ("module5-traffic", "Task 5.8"),
    ),
}  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    """Read what stands after ``--`` on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "module", type=int, nargs="?", default=LAST_MODULE, choices=range(LAST_MODULE + 1)
    )
    parser.add_argument("--hide_function_defs", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    st.set_page_config(page_title="minitorch-flash", layout="wide")
    if not (st.get_option("server.address") and st.get_option("server.allowedHosts")):
        st.error(
            "other machines or web pages could open the app; start it in the root of the repository, or "
            "with --server.address=localhost --server.allowedHosts=localhost"
        )
        st.stop()
    args = parse(sys.argv[1:])
    names = [name for name, page in PAGES.items() if page.module <= args.module]
    if "page" not in st.session_state:
        # Not by index: an older Streamlit takes another index for another widget, and forgets the click.
        asked = st.query_params.get("page")
        st.session_state["page"] = asked if asked in names else names[0]
    name: str = st.sidebar.radio(  # type: ignore[assignment]  # there is always a choice
        "page",
        names,
        format_func=lambda key: f"{PAGES[key].module} · {PAGES[key].title}",
        key="page",
    )
    st.query_params["page"] = name
    page = PAGES[name]
    st.title(page.title)
    st.markdown(page.about)
    show_guide(*page.guide)
    file, function = page.place
    try:
        getattr(importlib.import_module(f"app_pages.{file}"), function)(args.hide_function_defs)
    except (NotImplementedError, ImportError) as error:  # in a starter tree
        refuse(f"this page needs code that is not written yet: {error}")


main()
