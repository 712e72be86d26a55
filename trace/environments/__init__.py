"""What a rollout acts in: the protocol of environments, search question answering, scoring."""

from .protocol import Environment, Message, StepResult

__all__ = ["Environment", "Message", "StepResult"]
