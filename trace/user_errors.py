"""What a user can mend in whatever samples rollouts: shown as one message, without a traceback."""

from __future__ import annotations

from .engines.protocol import EngineError
from .environments.math_check import MathCheckError
from .environments.protocol import ToolOutageError
from .missing_library import MissingLibraryError
from .policy.module import ModelError
from .ranks import RankError
from .rollout.transcript import TemplateError
from .sandbox.limits import SandboxError
from .tasks.records import RecordError

SAMPLING_ERRORS = (
    EngineError,
    FileNotFoundError,
    MathCheckError,
    MissingLibraryError,
    ModelError,
    RankError,
    RecordError,
    SandboxError,
    TemplateError,
    ToolOutageError,
)
