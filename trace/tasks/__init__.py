"""What the trainer trains on: tasks, the files they come from, and a synthetic world of them.

Knows nothing of environments, engines or models. Import from the modules; the plain data is also here.
"""

from .task import Passage, Task

__all__ = ["Passage", "Task"]
