"""The grader gives points for what is right, and a submission cannot take them otherwise."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from course import expected as course_expected
from course import grader as course_grader
from course import workplace as course_workplace
from course.assembly import assemble
from course.command import main
from course.confine import has_bubblewrap, landlock_version
from course.expected import Expected, arguments
from course.grader import grade_task
from course.kernel_text import KERNELS, fault_of, faults
from course.markers import fill, read_bodies, replaced
from course.options import Options
from course.starter_trees import start
from course.tasks import MODULES, find_task, tasks_of, tasks_until
from course.verdict import Verdict, judge
from course.workplace import Ending, Workplace

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


# -- the grader ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Module 0, solved."""
    start(0, tree := tmp_path_factory.mktemp("solved"))
    fill(tree, [task.id for task in tasks_of(0)], read_bodies(ROOT))
    return tree


@pytest.fixture
def student(solved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(solved, tmp_path / "student")


def graded(
    student: Path, expected: Expected, task: str = "0.4", gpu: bool = False, **limits: int
) -> Verdict:
    folder = student.parent / "place"
    folder.mkdir()
    place = Workplace(folder, gpu)
    assemble(student, place.tree, 0)
    return grade_task(place, replace(find_task(task), **limits), expected)


def at_import(student: Path, code: str) -> None:
    file = student / "minitorch" / "module.py"
    text = file.read_text(encoding="utf-8")
    mark = "from typing import Any\n"
    assert mark in text
    file.write_text(text.replace(mark, mark + code), encoding="utf-8")


def in_train(student: Path, code: str) -> None:
    file = student / "minitorch" / "module.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("        self.training = True\n        for", f"{code}        for"),
                    encoding="utf-8")  # fmt: skip


def test_a_solved_tree_gets_full_points(
    student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    assert main(["grade", str(student), "--json", str(result)]) == 0
    summary = json.loads(result.read_text(encoding="utf-8"))
    assert summary["points"] == summary["possible"] == sum(task.points for task in tasks_until(0))
    assert summary["all_passed"] is True
    assert [task["status"] for task in summary["tasks"]] == ["passed"] * len(tasks_of(0))
    assert "points 40 of 40" in capsys.readouterr().out


def test_a_starter_tree_gets_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(0, tmp_path / "new")
    assert main(["grade", str(tmp_path / "new"), "--task", "0.4"]) == 1
    out = capsys.readouterr().out
    assert "NotImplementedError: Task 0.4: Set training here" in out
    assert "      Task 0.4: As train, with the other value." in out, "each body is named"
    assert "points 0 of 10" in out


def test_the_first_assertion_that_fails_is_shown(student: Path, expected: Any) -> None:
    in_train(student, "        self.training = None\n")
    result = graded(student, expected)
    assert (result.status, result.points) == ("failed", 7)  # of 10, for three of four tests
    assert result.message.startswith(
        "test_train_and_eval_reach_every_module: AssertionError: after"
    )
    assert "At index 0 diff: None != True" in result.message  # all of it
    assert (result.also, result.passed, result.tests) == ([], 3, 4)


FOREVER = """import sys, threading
def forever():
    while True:
        try:
            print('more', flush=True)
        except (OSError, ValueError):
            pass
threading.Thread(target=forever).start()
"""
BEGINS = "in test_train_and_eval_reach_every_module"


@pytest.mark.parametrize(
    ("place", "code", "limits", "message"),
    [
        (in_train, "        while True: pass\n", {"seconds": 6}, f"stopped after 6 s, {BEGINS}"),
        (
            at_import, FOREVER, {"seconds": 15},
            "stopped after 15 s, when the tests of the task had run",
        ),
        (in_train, "        while True: print('more' * 1000)\n", {}, "OSError: [Errno 27]"),
        pytest.param(
            in_train,
            "        eaten = []\n        while True: eaten.append(bytearray(1 << 24))\n",
            {"memory_mb": 2048}, "the limit is 2048 MB",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="memory is limited only there"),
        ),
        (in_train, "        import os; os._exit(0)\n", {}, "ended early (exit code 0)"),
    ],
    ids=["a loop", "a thread", "printing", "memory", "an end"],
)  # fmt: skip
def test_what_does_not_end_by_itself_is_stopped(
    student: Path, expected: Any, place: Any, code: str, limits: dict[str, Any], message: str
) -> None:
    place(student, code)
    result = graded(student, expected, **limits)
    assert message in result.message
    assert result.status == "failed"


SKIP = "import pytest; pytest.skip('x', allow_module_level=True)"


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "import sys; sys.exit(0)", SKIP])
def test_ending_the_process_early_is_no_pass(student: Path, expected: Any, end: str) -> None:
    at_import(student, end + "\n")
    result = graded(student, expected)
    assert (result.status, result.passed) == ("failed", 0)


WRITE = """import os
for handle in range(1, 64):
    try:
        os.write(handle, text.encode())
    except OSError:
        pass
"""
WRONG = "        self.training = None\n"
#: Each makes the report say that every test has passed.
FORGERIES = {
    "no test runs": "import _pytest.python as p; p.Function.runtest = lambda self: None\n",
    "the recorder is replaced": """import gc
for thing in gc.get_objects():
    if type(thing).__name__ == 'Recorder':
        write = thing.write
        def forged(record, write=write):
            write(record | {'outcome': 'passed', 'message': ''} if 'id' in record else record)
        thing.write = forged
""",
    "a report is written by hand": """import json, os
text = ''.join(
    json.dumps({'id': t, 'when': w, 'outcome': 'passed', 'message': '', 'notes': {}}) + chr(10)
    for t in TESTS for w in ('setup', 'call', 'teardown')
) + json.dumps({'finished': 0}) + chr(10) + json.dumps({'task': '0.4', 'values': {}}) + chr(10)
"""
    + WRITE
    + """os._exit(0)
""",
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_report_gives_no_points_for_bodies_that_are_not_written(
    student: Path, expected: Expected, forgery: str
) -> None:
    shutil.rmtree(student)
    start(0, student)
    at_import(student, f"TESTS = {expected.tests['0.4']!r}\n{forgery}")
    result = graded(student, expected)
    assert (result.status, result.points) == ("failed", 0), result
    assert result.passed == result.tests  # as the report says
    assert "4 of 4 calls with other arguments gave wrong results, or none: " in result.message


def test_a_forged_report_gives_no_points_for_a_wrong_body(
    student: Path, expected: Expected
) -> None:
    in_train(student, WRONG)
    at_import(student, FORGERIES["the recorder is replaced"])
    result = graded(student, expected)
    assert (result.status, result.passed, result.tests) == ("failed", 4, 4)
    assert result.points == 7  # as for an honest report
    assert result.message.endswith("gave wrong results, or none: train")


@pytest.mark.parametrize("record", [{"id": [], "when": 1}, {"begun": 3}, {"notes": 1}], ids=str)
def test_a_report_that_makes_no_sense_does_not_end_the_grader(
    student: Path, expected: Any, record: Any
) -> None:
    at_import(student, f"text = {json.dumps(record)!r} + chr(10)\n{WRITE}")
    assert graded(student, expected).status in ("failed", "passed")


@pytest.mark.parametrize("module", range(len(MODULES)))
def test_a_solution_gets_all_points_outside_of_its_process_and_an_empty_tree_none(
    module: int, expected: Expected, tmp_path: Path
) -> None:
    """Only calls and texts are judged; no test runs."""
    place = Workplace(tmp_path / "place", False)
    start(module, tree := tmp_path / "tree")
    for solved, emulated in ((False, False), (False, True), (True, False), (True, True)):
        tasks = [task for task in tasks_of(module) if task.emulated == emulated]
        fill(tree, [task.id for task in tasks if solved], read_bodies(ROOT))
        shutil.rmtree(place.tree)
        assemble(tree, place.tree, module)
        job = {
            "trusted": False, "tree": str(place.tree), "memory_mb": 4096, "seconds": 300,
            "seeds": {task.id: expected.seeds[task.id] for task in tasks},
            "arguments": arguments(place.tree, ["--collect-only"], ""),
        }  # fmt: skip
        records, end = place.run(job, emulated, 300.0)
        for task in tasks:
            own = [r for r in records if "finished" in r or r.get("task") == task.id]
            lacking = faults(place.tree, task.id)
            result = judge(task, ["t"], expected.values[task.id], lacking, own, end)
            assert result.outside == task.points * solved, (task.id, lacking, own)


def test_the_tests_of_the_course_count_and_not_the_students(student: Path, expected: Any) -> None:
    in_train(student, "        self.training = None\n")
    (student / "tests" / "course" / "test_module.py").write_text("", encoding="utf-8")
    (student / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-k no'\n")
    (student / "conftest.py").write_text("import os; os._exit(0)\n", encoding="utf-8")
    assert graded(student, expected).message.startswith("test_train_and_eval_reach_every_module")


def test_a_file_of_the_students_own_is_taken_along(student: Path, expected: Any) -> None:
    (student / "minitorch" / "mine.py").write_text("YES = True\n", encoding="utf-8")
    in_train(student, "        from .mine import YES\n        self.training = YES\n")
    assert graded(student, expected).status == "passed"


def test_a_submission_cannot_write_outside(student: Path, expected: Any, tmp_path: Path) -> None:
    target, moved = tmp_path / "outside.txt", tmp_path / "kept.txt"
    moved.write_text("kept", encoding="utf-8")
    attempts = [
        f"open({str(target)!r}, 'w').write('x')",
        f"__import__('os').remove({str(moved)!r})",
        f"__import__('os').system('touch {target}')",
        f"__import__('subprocess').run(['touch', {str(target)!r}])",
        f"__import__('pathlib').Path({str(tmp_path / 'folder')!r}).mkdir()",
    ]
    up, link = "../" * 3 + target.name, "__import__('os').environ['TMPDIR'] + '/link'"
    attempts += [
        f"open({up!r}, 'w').write('x')",
        f"__import__('os').symlink({str(tmp_path)!r}, {link}); open({link} + '/outside.txt', 'w')",
        f"__import__('os').link({str(moved)!r}, {link} + '2'); open({link} + '2', 'w')",
        f"__import__('os').rename({str(moved)!r}, {str(target)!r})",
        f"__import__('os').chmod({str(moved)!r}, 0)",
        f"__import__('os').execv('/bin/touch', ['touch', {str(target)!r}])",
    ]
    if landlock_version():  # past Python: the kernel says no
        attempts.append(f"__import__('ctypes').CDLL(None).creat({str(target).encode()!r}, 0o600)")
        attempts.append(f"__import__('ctypes').CDLL(None).system({f'touch {target}'.encode()!r})")
    code = "".join(f"try:\n    {a}\nexcept OSError:\n    pass\n" for a in attempts)
    at_import(student, code)
    result = graded(student, expected)
    assert result.status == "passed", result.message  # it does no harm, and the rest is right
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.txt", "place", "student"]
    assert moved.read_text(encoding="utf-8") == "kept"


FORK = """import ctypes, os, time
libc = ctypes.CDLL(None)
for _ in range(2):
    if libc.fork() == 0:
        libc.setsid()
        while True:
            open(os.environ['TMPDIR'] + '/alive', 'w').close()
            time.sleep(0.05)
"""
IN_KERNEL = pytest.mark.skipif(not landlock_version(), reason="the kernel has to help")


@IN_KERNEL
def test_what_a_submission_leaves_running_is_ended(student: Path, expected: Any) -> None:
    at_import(student, FORK)
    # Only where a GPU's driver may need it, a submission can start processes at all.
    assert graded(student, expected, gpu=True).status == "passed"
    alive = student.parent / "place" / "tmp" / "alive"
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()


@IN_KERNEL
def test_a_submission_starts_no_process_and_asks_no_other(student: Path, expected: Any) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(student.parent / "door"))
    server.listen()
    # A signal to another process is refused from the sixth version of Landlock on.
    signals = "try:\n    opened.append(os.kill(os.getppid(), 0))\nexcept OSError:\n    pass\n"
    signals = signals if landlock_version() >= 6 else ""
    sockets = "(socket.AF_INET, 1), (socket.AF_INET, 2), (socket.AF_INET6, 2), (socket.AF_UNIX, 1)"
    at_import(
        student,
        f"{FORK}import os, signal, socket\nopened = []\n"
        f"for kind in [{sockets}]:\n    try:\n        opened.append(socket.socket(*kind))\n"
        "    except OSError:\n        pass\n"
        f"{signals}assert not opened, opened\n",
    )
    result = graded(student, expected)
    assert result.status == "passed", result.message
    assert not (student.parent / "place" / "tmp" / "alive").exists()
    server.close()


def test_a_disk_is_not_filled(
    student: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course_workplace, "MOST_WRITTEN", 16 << 20)
    in_train(
        student,
        "        import os, time\n        for i in range(4000):\n"
        "            open(os.environ['TMPDIR'] + f'/{i}', 'wb').write(bytes(1 << 20))\n"
        "            time.sleep(0.02)\n",
    )
    result = graded(student, expected)
    assert result.message.startswith("stopped when its files had more than"), result.message
    assert list((student.parent / "place" / "tmp").iterdir()) == []


def test_a_link_in_the_tree_is_not_followed(
    student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("kept", encoding="utf-8")
    (student / "result.json").symlink_to(kept)
    (student / "minitorch" / "taken.py").symlink_to(ROOT / "minitorch" / "module.py")
    result = student / "result.json"
    assert main(["grade", str(student), "--task", "0.4", "--json", str(result)]) == 0
    assert kept.read_text(encoding="utf-8") == "kept"
    assert json.loads(result.read_text(encoding="utf-8"))["points"] == 10
    at_import(student, "from . import taken\n")
    assert main(["grade", str(student), "--task", "0.4"]) == 1
    assert "cannot import name 'taken'" in capsys.readouterr().out


def test_the_attempt_to_write_outside_is_named(
    student: Path, expected: Any, tmp_path: Path
) -> None:
    in_train(student, f"        open({str(tmp_path / 'outside.txt')!r}, 'w')\n")
    message = graded(student, expected).message
    assert "a submission may not change" in message and "outside.txt" in message


@pytest.fixture(params=["namespaces", "kernel"])
def confined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By bubblewrap, where it is installed, and without it."""
    if not landlock_version():
        pytest.skip("the kernel has to help")
    if request.param == "kernel":
        monkeypatch.setattr(course_workplace, "has_bubblewrap", lambda: False)
    elif not has_bubblewrap():
        pytest.skip("bwrap is not installed, or may not make namespaces")
    return request.param


def test_a_submission_reads_neither_the_solutions_nor_another_submission(
    student: Path, expected: Any, confined: str
) -> None:
    start(0, neighbour := student.parent / "neighbour")
    files = [ROOT / "minitorch" / "module.py", neighbour / "minitorch" / "module.py"]
    at_import(
        student,
        f"import ctypes\nopened = []\nfor file in {[str(file) for file in files]!r}:\n"
        "    opened.append(ctypes.CDLL(None).open(file.encode(), 0))\n"
        "    try:\n        opened.append(open(file).fileno())\n    except OSError:\n        pass\n"
        "assert max(opened) < 0, opened\n",
    )
    result = graded(student, expected)
    assert result.status == "passed", result.message
    if confined == "kernel":  # in namespaces the files are not there
        assert len([words for words in result.refused if words.startswith("read ")]) == 2


#: Calls of the C library that succeed without a filter, on files and on the grader's process.
ATTACKS = {
    "chmod": "chmod(path, 0o600)",
    "fchmodat": "fchmodat(-100, path, 0o600, 0)",
    "chown": "chown(path, os.getuid(), -1)",
    "setxattr": "setxattr(path, b'user.a', b'b', 1, 0)",
    "utimensat": "utimes(path, None)",
    "prlimit64": "prlimit(parent, 0, bytes([9] + [0] * 15), None)",
    "kill": "kill(parent, 0)",
    "sched_setaffinity": "sched_setaffinity(parent, 8, bytes([1] + [0] * 7))",
    "ptrace": "ptrace(16, parent, None, None)",
    "process_vm_readv": "process_vm_readv(parent, None, 0, None, 0, 0)",
    "unshare": "unshare(0x10000000)",
}


def test_what_is_refused_to_a_submission_stands_in_the_report(
    student: Path, expected: Any, confined: str
) -> None:
    (student.parent / "kept.txt").write_text("kept", encoding="utf-8")
    calls = ", ".join(f"lambda: libc.{call}" for call in ATTACKS.values())
    at_import(
        student,
        f"import ctypes, os\nlibc, parent = ctypes.CDLL(None), os.getppid()\n"
        f"for path in ({str(student.parent / 'kept.txt').encode()!r}, b'/', os.environb[b'HOME']):\n"
        f"    done = [call() for call in ({calls})]\n    assert set(done) == {{-1}}, done\n",
    )
    result = graded(student, expected)
    assert result.status == "passed", result.message
    assert set(ATTACKS) - {"utimensat"} <= {*result.refused}
    assert {"utimensat", "utimes"} & {*result.refused}


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    student: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Workplace, "run", lambda *args: ([], Ending(1, False)))
    monkeypatch.setattr(course_expected, "find_spec", lambda name: None)
    assert main(["grade", str(student), "--task", "0.4"]) == 2
    error = capsys.readouterr().err
    assert f"the grader needs pytest and hypothesis, which {sys.executable} lacks" in error
    assert f'{sys.executable} -m pip install -e ".[course]"' in error
    monkeypatch.undo()
    assert course_expected.missing() == ""


def test_a_killed_grader_leaves_no_folder(student: Path, tmp_path: Path) -> None:
    at_import(
        student,
        "import os, time\nwhile True:\n    time.sleep(0.05)\n"
        "    open(os.environ['TMPDIR'] + '/alive', 'w').close()\n",
    )
    (place := tmp_path / "tmp").mkdir()
    command = [sys.executable, str(ROOT / "project" / "course.py"), "grade", str(student)]
    run = subprocess.Popen(
        [*command, "--task", "0.4"],
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.DEVNULL,
    )

    def wait_until(holds: Callable[[], bool]) -> None:
        stop = time.monotonic() + 120.0
        while not holds():
            assert time.monotonic() < stop, list(place.rglob("*"))[:20]
            time.sleep(0.1)

    wait_until(lambda: any(place.rglob("alive")))
    run.kill()
    run.wait()
    wait_until(lambda: not any(place.iterdir()))


# -- tasks in which tests are written ------------------------------------------------------------


def rewritten(student: Path, name: str, body: str) -> None:
    file = student / "tests" / "course" / "test_operators.py"
    text = file.read_text(encoding="utf-8")
    new = replaced(
        text, "tests/course/test_operators.py", lambda r: [body] if r.key.name == name else None
    )
    assert new != text
    file.write_text(new, encoding="utf-8")


#: Bodies that hold and notice nothing, and how many broken operators each lets pass.
EMPTY = {
    "test_sigmoid": ("    pass", 4),
    "test_symmetric": ("    assert mul(a, b) == mul(a, b)", 2),
    "test_transitive": ("    assert lt(a, c) in (0.0, 1.0)", 2),
    "test_other": ("    assert x == x", 1),
}


def test_a_property_test_that_notices_nothing_is_no_pass(student: Path, expected: Any) -> None:
    for name, (body, _) in EMPTY.items():
        rewritten(student, name, body)
    result = graded(student, expected, "0.2")
    assert result.status == "failed"
    assert "test_sigmoid passes with a broken sigmoid" in result.message
    assert result.tests - result.passed == sum(missed for _, missed in EMPTY.values())


def test_property_tests_are_judged_by_the_courses_operators(student: Path, expected: Any) -> None:
    file = student / "minitorch" / "operators.py"
    text = file.read_text(encoding="utf-8").replace("return x * y", "return x * y + 1.0")
    file.write_text(text, encoding="utf-8")
    assert graded(student, expected, "0.2").status == "passed"


def test_markers_that_are_gone_are_named(student: Path, expected: Any) -> None:
    file = student / "tests" / "course" / "test_operators.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("    # END TASK 0.2\n", "", 1), encoding="utf-8")
    assert "tests/course/test_operators.py, line" in graded(student, expected, "0.2").message


# -- the text of kernels -----------------------------------------------------------------------------

#: The body of ``_sum_practice`` as others write it.
SUM = """    pos = cuda.threadIdx.x
    cache = cuda.shared.array(32, float64)
    cache[pos] = 0.0
    if cuda.blockIdx.x * 32 + pos < size:
        cache[pos] = a[cuda.blockIdx.x * 32 + pos]
    for j in (1, 2, 4, 8, 16):
        cuda.syncthreads()
        if pos % (j * 2) == 0:
            cache[pos] += cache[pos + j]
    if pos == 0:
        out[cuda.blockIdx.x] = cache[0]"""
FIRST = "    cuda.syncthreads()  # every element"


@pytest.mark.parametrize(
    ("task", "number", "right", "wrong", "fault"),
    [
        ("3.1", 0, "if aligned(out_shape, out_strides, in_shape, in_strides):\n            for i in prange("
         "len(out)):\n                out[i] = fn(in_storage[i])\n        else:",
         "for i in prange(len(out)):\n            if same:\n                out[i] = fn(in_storage[i])\n"
         "        if True:", ""),
        ("3.1", 0, "if aligned(out_shape, out_strides, in_shape, in_strides):\n            for i in prange("
         "len(out)):\n                out[i] = fn(in_storage[i])\n        else:",
         "for i in prange(len(out)):\n            if same:\n                o = a = i\n            else:\n"
         "                o = a = index_to_position(i, out_strides)\n"
         "            out[o] = fn(in_storage[a])\n        if True:", ""),
        ("3.3", 1, "SUM", "", ""),
        ("3.3", 1, "SUM", "        cuda.syncthreads()\n", "line .* reads cache, .* missing above line"),
        ("3.3", 1, FIRST, "    pass  #", "line .* reads partial, .* missing above line"),
        ("3.3", 1, FIRST, "    if size < 0:\n    " + FIRST, "missing above line"),
        ("3.3", 1, "cuda.shared", "cuda.local", "uses 0 of 1 arrays in shared memory"),
        ("3.4", 0, "cuda.syncthreads()  # all have", "pass  #", "writes a_tile, .* missing below line"),
        ("3.4", 0, "a_tile[tile_row, k] *", "a_storage[a_start + k] *", "uses global memory in the inn"),
        ("3.4", 0, "b_tile[k, tile_col]", "a_tile[k, tile_col]", "uses 1 of 2 arrays"),
        ("5.1", 0, "x.dtype.type(-np.inf)", "x.max()", "x is read in 2 places"),
    ],
)  # fmt: skip
def test_a_text_is_judged_as_what_it_says(
    task: str, number: int, right: str, wrong: str, fault: str
) -> None:
    file, name, arrays = KERNELS[task][number]
    text = (ROOT / file).read_text(encoding="utf-8")
    if right == "SUM":
        body = SUM.replace(wrong, "").split("\n")
        text = replaced(text, file, lambda r: body if r.key.name == name else None)
    else:
        assert right in text
        text = text.replace(right, wrong)
    found = fault_of(text, name, task, arrays)
    assert re.search(fault, found) if fault else not found, found


#: Makes each report of its process say what is wanted: of the judge of texts, of clocks and of counts.
PATCHES = """import time
from course import kernel_text
kernel_text.faults = lambda tree, task: {}
time.perf_counter = time.process_time = lambda: 0.0
"""


@pytest.mark.parametrize(
    ("task", "file", "right", "wrong", "points"),
    [
        ("3.3", "minitorch/backends/cuda_practice.py", "cuda.syncthreads()  # every", "pass  # every", 13),
        ("3.4", "minitorch/backends/cuda_practice.py", "a_shared[row, k]", "a[row * size + k]", 12),
        ("5.1", "kernels/reference/softmax_ladder.py", "len(x), block", "x.copy().size, block", 4),
    ],
)  # fmt: skip
def test_forged_counts_and_barriers_give_no_points(
    task: str, file: str, right: str, wrong: str, points: int, expected: Expected, tmp_path: Path
) -> None:
    chosen = find_task(task)
    start(chosen.module, tree := tmp_path / "tree")
    fill(tree, [task.id for task in tasks_of(chosen.module)], read_bodies(ROOT))
    text = (tree / file).read_text(encoding="utf-8")
    assert right in text
    head, future, rest = text.partition("from __future__ import annotations\n")
    forged = PATCHES + FORGERIES["the recorder is replaced"] + rest.replace(right, wrong)
    (tree / file).write_text(head + future + forged, encoding="utf-8")
    place = Workplace(tmp_path / "place", gpu=False)
    assemble(tree, place.tree, chosen.module)
    result = grade_task(place, chosen, expected)
    # Without a barrier values may be wrong too.
    assert result.status == "failed" and result.points <= points, result
    assert result.passed == result.tests  # as the report says
    assert "the tests passed, but " in result.message


# -- tasks that wait, and those that build on others -----------------------------------------------

STUBS = {"5.4": "NotImplementedError: Task 5.4: Lines 10 to 13 (thread (0, 0, 0) of block (1, 0, 0))",
         "5.5": "NotImplementedError: Task 5.5: Line 19"}  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "waits_for", "message"),
    [
        ([STUBS["5.4"], STUBS["5.4"], ""], "5.4", "waits for task 5.4, which is not written yet"),
        ([STUBS["5.5"], STUBS["5.4"]], "", f"t0: {STUBS['5.5']}"),
        ([STUBS["5.4"], STUBS["5.5"]], "", f"t1: {STUBS['5.5']}"),
        ([STUBS["5.4"], "assert 1 == 2"], "", "t1: assert 1 == 2"),
        (["", ""], "", ""),
    ],
)
def test_a_task_waits_if_only_other_tasks_are_missing(
    errors: list[str], waits_for: str, message: str
) -> None:
    records: list[Any] = [
        {"id": f"a.py::t{i}", "when": when, "message": error,
         "outcome": "failed" if error and when == "call" else "passed"}
        for i, error in enumerate(errors) for when in ("setup", "call", "teardown")
    ]  # fmt: skip
    tests = [f"a.py::t{i}" for i in range(len(errors))]
    end = Ending(0, False)
    verdict = judge(find_task("5.5"), tests, {}, {}, [*records, {"finished": 0}], end)
    assert (verdict.waits_for, verdict.message) == (waits_for, message)


def test_what_waits_and_what_it_waits_for_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(0, tmp_path / "zero")
    fill(tmp_path / "zero", ["0.3"], read_bodies(ROOT))
    result = tmp_path / "result.json"
    assert main(["grade", str(tmp_path / "zero"), "--task", "0.3", "--json", str(result)]) == 1
    out = capsys.readouterr().out
    assert "waits for task 0.1" in out and "waiting" in out
    (task,) = json.loads(result.read_text(encoding="utf-8"))["tasks"]
    assert (task["status"], task["waits_for"], task["points"]) == ("waiting", "0.1", 0)


def test_a_failed_task_takes_no_points_from_one_that_builds_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong map fails the tests of the product, but not the calls of its loop."""
    own = [find_task("0.3"), replace(find_task("0.4"), needs=("0.3",))]
    results = [Verdict(task.id, "", "", points=5, possible=10, outside=10) for task in own]
    monkeypatch.setattr(course_grader, "_grade_all", lambda *args: (r for r in results))
    start(0, tmp_path / "zero")
    course_grader.grade(tmp_path / "zero", Options(tuple(own)))
    assert [result.points for result in results] == [5, 10]
    assert results[1].message.endswith("(it builds on 0.3, which has not passed)")
    assert find_task("3.2").needs == ("3.1",)
