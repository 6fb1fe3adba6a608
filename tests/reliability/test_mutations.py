"""The script that changes lines draws changes of code alone, and the same ones of the same lines."""

from __future__ import annotations

from pathlib import Path

from reliability.mutations import drawn, mutations_of

SOURCE = """
def f(x: list[int], n: int = 3) -> int | None:
    \'\'\'Add 1.\'\'\'
    if n < 2 and not x:
        raise ValueError(f"n must be {1 + 1} or more")
    x[0, 1] += n // 2
    print(n + 1)
    return x[n:4]
"""
CHANGES = {
    (2, "(4)"), (4, "(n <= 2)"), (4, "(3)"), (4, "(n < 2 or not x)"), (4, "(x)"), (5, "pass"),
    (6, "x[0, 1] -= n // 2"), (6, "pass"), (6, "(x[1, 0])"), (6, "(1)"), (6, "(2)"), (6, "(n * 2)"),
    (6, "(3)"), (7, "pass"), (8, "(x[n:])"), (8, "(5)"),
}  # fmt: skip


def test_code_is_changed_and_no_text_or_annotation() -> None:
    found = mutations_of("a.py", SOURCE.encode())
    assert {(one.line, one.text) for one in found} == CHANGES
    for one in found:
        changed = SOURCE.encode()[: one.first] + one.text.encode() + SOURCE.encode()[one.last :]
        compile(changed, "a.py", "exec")


def test_a_line_has_the_same_change_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "kernels" / "a.py"
    path.parent.mkdir()
    texts = []
    for more in ("", "# one line more\n"):
        path.write_text(more + SOURCE, encoding="utf-8")
        texts.append([(one.kind, one.text) for one in drawn(tmp_path, ["kernels"], 3, 0)])
    assert texts[0] == texts[1] and len(texts[0]) == 3
