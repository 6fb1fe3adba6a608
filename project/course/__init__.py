"""The course: tasks, markers, starter trees, grading."""
