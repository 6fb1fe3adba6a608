"""What to grade of a submission, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from course.markers import CourseError
from course.tasks import Task, tasks_of


@dataclass(frozen=True)
class Options:
    """What to grade of a submission, and how.

    Attributes:
        chosen: The tasks; those of ``module`` if empty.
        module: The module of the tree when None.
        gpu: Run CUDA tasks on the GPU; without one they are blocked, neither passed nor failed.
        seconds: Time limit of each task, in place of its own.
        memory_mb: Memory limit of each task, in place of its own.
        jobs: Tasks that are graded at the same time; on a GPU, which they would share, one.
    """

    chosen: tuple[Task, ...] = ()
    module: int | None = None
    gpu: bool = False
    seconds: int | None = None
    memory_mb: int | None = None
    jobs: int = 2

    def tasks(self, submission: Path, last: int) -> list[Task]:
        """Return the tasks of a submission, the tree of module ``last``, with their limits.

        Raises:
            CourseError: If the tree does not have them.
        """
        tasks = self.chosen or tasks_of(last if self.module is None else self.module)
        late = [task.id for task in tasks if task.module > last]
        if late or not tasks:
            raise CourseError(
                f"{submission} is the tree of module {last}; it has no task {late or self.module}"
            )
        limits = {"seconds": self.seconds, "memory_mb": self.memory_mb}
        return [replace(task, **{k: v for k, v in limits.items() if v}) for task in tasks]
