"""Every architecture of the registry of transformers, tiny and random, with our attention and its own.

``tests/support/models/architectures.py`` makes the models; ``--names llama bert`` tries some alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.kit import Case, Figure, Measurement, Record, Run, markdown


def cases(run: Run) -> Iterator[Case]:
    run.note(torch=run.pytorch.__version__)
    from tests.support.models.architectures import KINDS, tried

    for name in run.names or KINDS:
        yield {"architecture": name}, lambda name=name: {"result": tried(name)}


def _rank(result: str) -> tuple[bool, bool, int, str]:
    return not result.startswith("tested"), result != "refused", -result.count(","), result


def table(record: Record) -> str:
    """Return how many and which architectures have each of the results."""
    rows = []
    for result in sorted({row["result"] for row in record["rows"]}, key=_rank):
        names = sorted(r["architecture"] for r in record["rows"] if r["result"] == result)
        rows.append([result, len(names), ", ".join(f"`{name}`" for name in names)])
    return markdown(["result", "count", "architectures"], rows)


def figures(record: Record) -> list[Figure]:
    results = [row["result"] for row in record["rows"]]
    return [
        Figure("tested", sum(x.startswith("tested") for x in results), 400),
        Figure("results that differ", sum("FAILS" in x for x in results), 0, is_most=True),
    ]


MEASUREMENT = Measurement(
    "architectures", "Which models of transformers compute with our attention what they do with theirs?",
    cases, {"cpu": {"normal": {"names": ()}, "quick": {"names": ("bert", "llama")}}}, table=table,
    figures=figures, minutes={"cpu": 20},
    paths=("kernels/interop/torch", "tests/support/models/architectures.py"),
)  # fmt: skip
