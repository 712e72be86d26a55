"""What a run is made of, between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import ledger
from .allocation.predictor import SuccessPredictor
from .config.schema import Config
from .engines.protocol import Engine
from .phases import Phases
from .policy.zero3 import Zero3Policy
from .ranks import Ranks
from .rollout.collector import Collector
from .tasks.order import TaskOrder
from .tasks.task import Task


@dataclass
class Run:
    """Everything a step works with. Pool, budget and predictor are global: rank 0 decides for all."""

    config: Config
    ranks: Ranks
    tasks: Sequence[Task]
    order: TaskOrder
    collector: Collector
    engine: Engine
    policy: Zero3Policy
    reference: Zero3Policy | None
    predictor: SuccessPredictor
    phases: Phases
    version: int = 0  # of the weights the engine samples with
    totals: ledger.Ledger = field(default_factory=ledger.Ledger)
