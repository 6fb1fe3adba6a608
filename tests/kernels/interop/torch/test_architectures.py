"""Architectures of transformers: those that the page lists compute what their own attention does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is missing: pip install transformers"
)

from transformers.models.auto.configuration_auto import (  # noqa: E402
    CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)

from ....support.models.architectures import PAGE, check, on_page, tried  # noqa: E402

RESULTS = on_page()
of_the_page = pytest.mark.skipif(
    f"transformers {transformers.__version__}." not in PAGE.read_text(),
    reason="the page is of another version of transformers",
)


@of_the_page
def test_the_page_lists_every_architecture_of_the_registry() -> None:
    assert set(RESULTS) == set(CONFIG_MAPPING_NAMES)
    assert not [name for name, result in RESULTS.items() if "FAILS" in result]
    assert sum(result == "tested" for result in RESULTS.values()) > 250


@pytest.mark.parametrize("kind", [name for name, result in RESULTS.items() if result == "tested"])
def test_outputs_and_gradients_are_those_of_the_models_own_attention(kind: str) -> None:
    if kind not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    check(kind)


@of_the_page
@pytest.mark.parametrize("kind", [name for name, result in RESULTS.items() if result == "refused"])
def test_an_architecture_without_the_interface_is_refused(kind: str) -> None:
    assert tried(kind) == "refused"
