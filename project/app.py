"""The app: see the course's parts at work, module by module, up to a kernel's tiles.

streamlit run project/app.py                      every page
streamlit run project/app.py -- 2                 the pages of modules 0 to 2
streamlit run project/app.py -- 5 --hide_function_defs

Only this machine gets an answer, as .streamlit/config.toml says.  Files are shown, and no code of theirs
is run.
The last is for a lesson: the attention page then shows no source.  ``?page=attention`` opens one page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import streamlit as st
from app_pages import (
    attention_page,
    conv_page,
    graph_page,
    ladder_page,
    math_page,
    tensor_page,
    training_page,
)

LAST_MODULE = 5


class Page(NamedTuple):
    """One entry of the sidebar.

    Attributes:
        module: Of the course.
        title: In the sidebar.
        show: Shows it; takes whether to hide source.
    """

    module: int
    title: str
    show: Callable[[bool], None]


#: By the name in the address.
PAGES = {
    "math": Page(0, "Math sandbox", math_page.page),
    "manual": Page(0, "Classify by hand", training_page.manual_page),
    "autodiff": Page(1, "Scalar graph and autodiff", graph_page.scalar_page),
    "scalar": Page(1, "Train with scalars", training_page.scalar_page),
    "tensor": Page(2, "Tensor strides and views", tensor_page.page),
    "gradients": Page(2, "Tensor graph and autodiff", graph_page.tensor_page),
    "train": Page(2, "Train with tensors", training_page.tensor_page),
    "fast": Page(3, "Train on the fast backend", training_page.fast_page),
    "convolution": Page(4, "Convolution and pooling", conv_page.page),
    "attention": Page(5, "Attention, tile by tile", attention_page.page),
    "ladder": Page(5, "The ladder, measured", ladder_page.page),
}


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
    if not st.get_option("server.address"):  # an older Streamlit, started from another folder
        st.error(
            "every machine that reaches this one can open the app; start it in the root of the repository, "
            "or with --server.address=localhost"
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
    PAGES[name].show(args.hide_function_defs)


main()
