"""Records are measured again by the command that they name, and none is replaced by a shorter one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "project"))  # as for a script that runs there
import remake_records

SCRIPT = """
import json, sys
rows = [{"x": 1}] * int(sys.argv[1])
record = {"command": "python " + sys.argv[0], "date": "today", "versions": {"commit": "new"}, "rows": rows}
json.dump(record, open(sys.argv[sys.argv.index("--json") + 1], "w"))
"""


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of results with one device, whose records a script makes: of two rows, of one."""
    folder = tmp_path / "docs" / "results"
    (folder / "a-gpu").mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for name, rows in (("long", 2), ("short", 1)):
        record = {"command": f"python {script} {rows} --json {name}.json", "date": "then"}
        record |= {"versions": {"commit": "old"}, "rows": [{"x": 0}] * 2}
        (folder / "a-gpu" / f"{name}.json").write_text(json.dumps(record))
    for name, value in (("ROOT", tmp_path), ("RESULTS", folder), ("BUILD", tmp_path / "build")):
        monkeypatch.setattr(remake_records, name, value)
    monkeypatch.setenv("MINITORCH_COMMIT", "new")
    return folder


def _commit(path: Path) -> str:
    return str(json.loads(path.read_text())["versions"]["commit"])


def test_a_record_is_replaced_unless_the_new_one_has_fewer_rows(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remake_records.main(["a-gpu", "all"]) == 0
    assert _commit(results / "a-gpu" / "long.json") == "new"
    assert _commit(results / "a-gpu" / "short.json") == "old"
    assert "1 of 2 rows; kept the old ones" in capsys.readouterr().out
    assert remake_records.main(["a-gpu", "long"]) == 0
    assert "is of new already" in capsys.readouterr().out


def test_another_device_gets_records_of_its_own(results: Path) -> None:
    assert remake_records.main(["a-gpu", "long", "--into", "b-gpu"]) == 0
    assert _commit(results / "b-gpu" / "long.json") == "new"
    assert _commit(results / "a-gpu" / "long.json") == "old"


def test_gpus_measure_side_by_side_what_was_compiled_first(results: Path) -> None:
    record = results / "a-gpu" / "long.json"
    script, log = results.parents[1] / "script.py", results.parents[1] / "log"
    script.write_text(
        f"import os\nopen({str(log)!r}, 'a').write(os.environ['CUDA_VISIBLE_DEVICES'])\n{SCRIPT}"
    )
    (results / "a-gpu" / "other.json").write_text(record.read_text())
    options = ["--gpus", "3", "5", "--compile-first", "60"]
    assert remake_records.main(["a-gpu", "long", "other", *options]) == 0
    assert _commit(record) == _commit(results / "a-gpu" / "other.json") == "new"
    gpus = log.read_text()
    assert sorted(gpus[:2]) == ["3", "5"] and len(gpus) == 4 and {*gpus} <= {"3", "5"}


def test_ctrl_c_ends_all_records(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = results.parents[1] / "script.py"
    # The terminal sends SIGINT to both: here the script to its parent, and it ends later.
    interrupt = "import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(1)"
    script.write_text(f"{interrupt}\nraise SystemExit(1)")
    assert remake_records.main(["a-gpu", "all"]) == 130
    assert "short" not in capsys.readouterr().out
    assert _commit(results / "a-gpu" / "long.json") == "old"


def test_without_names_it_lists_the_records(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remake_records.main(["a-gpu"]) == 0
    assert "| long | then | old | python " in capsys.readouterr().out


def test_a_name_that_is_no_record_ends_in_one_line(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        remake_records.main(["a-gpu", "lung"])
    assert "a-gpu has no record lung; it has long, short" in capsys.readouterr().err
