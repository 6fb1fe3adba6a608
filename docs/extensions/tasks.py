"""The directive ``{tasks} 3``: the tasks of a module, from the course and the markers in the code."""

from __future__ import annotations

from typing import Any

from course.markers import ROOT, Region, marked_regions
from course.tasks import MODULES, Task, tasks_of
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


def _places(regions: list[Region]) -> list[str]:
    """Return "file: names" for each file with a body of a task, in the order of the code."""
    names: dict[str, list[str]] = {}
    for region in regions:
        own = names.setdefault(region.key.file, [])
        if region.key.name not in own:
            own.append(region.key.name)
    return [
        f"`{file}`: {', '.join(f'`{name}`' for name in own)}" if any(own) else f"`{file}`"
        for file, own in names.items()
    ]


def as_markdown(tasks: list[Task], regions: list[Region]) -> str:
    """Return a description of each task: title, points, hint, where to write, how to test."""
    lines = []
    for task in tasks:
        emulated = "MINITORCH_EMULATE=check " if task.emulated else ""
        files = " ".join(task.tests)
        lines += [f"**{task.id} {task.title}** ({task.points} points). {task.hint}", ""]
        places = _places([region for region in regions if region.key.task == task.id])
        lines += [f"- Write: {'; '.join(places)}"] if places else []
        lines += [f"- Test: `{emulated}python -m pytest -m {task.mark} {files}`", ""]
    return "\n".join(lines)


class Tasks(SphinxDirective):
    """Insert the task list of the module named in the argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the parsed list."""
        number = int(self.arguments[0])
        if number not in {module.number for module in MODULES}:
            raise self.error(f"there is no module {number}")
        tasks = tasks_of(number)
        text = as_markdown(tasks, marked_regions(ROOT))
        box = nodes.container(classes=["tasks"])
        self.state.nested_parse(StringList(text.splitlines(), "course_tasks"), 0, box)
        return [box]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("tasks", Tasks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
