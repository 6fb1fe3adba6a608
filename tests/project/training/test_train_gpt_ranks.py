"""``train_gpt.py`` on several ranks learns what one process learns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ...support.ranks import needs_mpi, python

pytestmark = [pytest.mark.slow, needs_mpi]
GRID = "--data-parallel", "2", "--ring", "2"


def trained(ranks: int, out: Path, *options: str) -> dict[str, Any]:
    """Run it and return its result."""
    small = "--steps 12 --layers 1 --width 16 --heads 2 --context 16 --sample 0 --max-seconds 200"
    given = [*([] if "--resume" in options else small.split()), *options]
    done = python(ranks, "project/train_gpt.py", "--out", str(out), *given)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "result.json").read_text(encoding="utf-8"))


def test_several_ranks_learn_what_one_does(tmp_path: Path) -> None:
    more = "--batch", "4", "--accumulate", "2", "--checkpoint-every", "6", "--clip", "0.5"
    alone = trained(0, tmp_path / "alone", *more)
    several = trained(4, tmp_path / "several", *more, *GRID)
    np.testing.assert_allclose(several["curve"]["train"], alone["curve"]["train"], atol=2e-5)
    assert several["held_out_loss"] == pytest.approx(alone["held_out_loss"], abs=2e-5)
    assert alone["ranks_ms"] == [] and len(several["ranks_ms"]) == 4
    for rank in several["ranks_ms"]:
        assert rank["compute"] > 0 and rank["waiting"] > 0 and rank["overlapped"] > 0
    # Each rank has written its share; other ranks go on with all of them.
    folder = tmp_path / "several" / "checkpoints"
    assert len([*folder.glob("part-*-of-4.step-*.safetensors")]) == 2 * 3
    (folder / "step-00000012.safetensors").unlink()
    again = trained(2, tmp_path / "several", "--resume", "--data-parallel", "1", "--ring", "2")
    assert again["resumed"] == [6]
    np.testing.assert_allclose(again["curve"]["train"], alone["curve"]["train"], atol=2e-5)
    assert again["held_out_loss"] == pytest.approx(alone["held_out_loss"], abs=2e-5)


def test_a_rank_with_other_options_is_refused_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(
        "import runpy, sys\n"
        "from mpi4py import MPI\n"
        "sys.path.insert(0, 'project')\n"
        "sys.argv = ['train_gpt.py', '--data-parallel', '2']\n"
        "sys.argv += ['--lr', '0.5'] if MPI.COMM_WORLD.rank == 1 else []\n"
        "runpy.run_path('project/train_gpt.py', run_name='__main__')\n",
        encoding="utf-8",
    )
    done = python(2, str(script))
    assert done.returncode != 0
    (line,) = re.findall(r"^rank \d of 2: .*", done.stderr, re.MULTILINE)
    assert "--lr is 0.005 on rank 0 and 0.5 on rank 1" in line
    assert "Traceback" not in done.stderr
