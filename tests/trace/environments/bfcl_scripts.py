"""What a policy would write, and other helpers of the BFCL tests."""

import inspect
import json

from trace_rl.environments.bfcl.simulators import Simulators
from trace_rl.environments.calls import parse_call
from trace_rl.environments.function_calling import FunctionCalling
from trace_rl.tasks.bfcl import SUBSETS, bfcl_entry, load_bfcl

TASKS = {task.id: task for side in load_bfcl() for task in side}
SAMPLE = [f"multi_turn_{subset}_{number}" for subset in SUBSETS for number in range(7, 200, 20)]


def keyword_arguments(text, simulators):
    """The arguments of a ground-truth call by name, as JSON knows no others."""
    call = parse_call(text)
    method = next(getattr(i, call.name) for i in simulators.instances.values() if hasattr(i, call.name))
    return call.name, dict(inspect.signature(method).bind(*call.positional, **call.arguments).arguments)


def write(tool_format, calls, simulators):
    """The calls as an action of the format."""
    if tool_format == "python":
        return f"[{', '.join(calls)}]"
    blocks = []
    for text in calls:
        name, arguments = keyword_arguments(text, simulators)
        blocks.append(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")
    return "<think>\nI should call something.\n</think>\n\n" + "\n".join(blocks)


def actions(entry_id, tool_format="hermes", one_by_one=False):
    """The ground truth as actions, turn by turn, each turn ended by a message."""
    entry = bfcl_entry(entry_id)
    simulators = Simulators(entry)
    for turn in entry.ground_truth:
        steps = [[call] for call in turn] if one_by_one else [list(turn)] if turn else []
        yield from (write(tool_format, step, simulators) for step in steps)
        yield "That is done."


def environment(**options):
    """An environment that counts four characters as a token."""
    return FunctionCalling(**{"count_tokens": lambda text: len(text) // 4, **options})


def state(env):
    """The whole state of an environment's simulators, comparable."""
    states = {}
    for name, instance in env._simulators.instances.items():
        values = dict(vars(instance))
        if "_random" in values:
            values["_random"] = values["_random"].getstate()
        if "_current_dir" in values:
            values["_current_dir"] = instance.pwd()
        states[name] = values
    return states
