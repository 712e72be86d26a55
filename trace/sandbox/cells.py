"""Runs cells one after the other in one interpreter, inside the confined process.

The code it runs may change anything it can reach, so nothing here looks a name up where cells can change it:
built-in functions come from a copy, functions of modules are bound when this module is imported. Where a cell
breaks the interpreter nevertheless, the call ends and the cell is not kept.
"""

from __future__ import annotations

import ast
import builtins
import sys
from os import _exit, dup2, fstat, write
from resource import RLIMIT_CPU, RUSAGE_SELF, getrlimit, getrusage, setrlimit
from signal import ITIMER_REAL, setitimer
from sys import setprofile, settrace
from types import CodeType, ModuleType, TracebackType
from typing import Any

__builtins__ = dict(vars(builtins))  # type: ignore[assignment]

STATUS, OUTPUT = 3, 4  # file descriptors of the child
CONFINED, REPLAYED = b"c", b"r"
SETUP_FAILED, OK, EXCEPTION, REJECTED, MEMORY, BROKEN, REPLAY_FAILED = range(90, 97)  # exit codes

_MESSAGE_CHARS = 2000
_FRAMES_SHOWN = 8
_ONLY_AST = ast.PyCF_ONLY_AST
_Expression, _ASTExpr = ast.Expression, ast.Expr
_stdout, _stderr = sys.stdout, sys.stderr


def run_cells(cells: list[str], hidden: list[str], cpu_seconds: int) -> None:
    """Repeats all cells but the last unseen, runs the last one with its output shown, and ends the process.

    Args:
        cells: the history and the new cell.
        hidden: folders of this machine, taken out of messages.
        cpu_seconds: processor time of the last cell.
    """
    code = BROKEN
    try:
        code = _Session(hidden).run(cells, cpu_seconds)
    except MemoryError:
        code = MEMORY
    finally:
        _exit(code)


class _Session:
    def __init__(self, hidden: list[str]) -> None:
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        self._names = main.__dict__
        self._sources: dict[str, list[str]] = {}
        self._hidden = hidden
        self._status, self._output = fstat(STATUS), fstat(OUTPUT)
        self._null = fstat(1)

    def run(self, cells: list[str], cpu_seconds: int) -> int:
        write(STATUS, CONFINED)
        for number, source in enumerate(cells[:-1], start=1):
            if self._cell(number, source, self._null) not in (OK, EXCEPTION):
                return REPLAY_FAILED
        dup2(OUTPUT, 1)
        dup2(OUTPUT, 2)
        _limit_cpu(cpu_seconds)
        if write(STATUS, REPLAYED) != 1:
            return BROKEN
        return self._cell(len(cells), cells[-1], self._output)

    def _cell(self, number: int, source: str, standard_output: Any) -> int:
        name = f"<cell {number}>"
        self._sources[name] = source.splitlines()
        try:
            body, last = _compile(source, name)
        except MemoryError:
            return MEMORY
        except BaseException as error:
            _print(self._describe(error))
            return REJECTED
        code = self._execute(body, last)
        settrace(None)
        setprofile(None)
        setitimer(ITIMER_REAL, 0)
        if not (_same(1, standard_output) and _same(STATUS, self._status) and _same(OUTPUT, self._output)):
            return BROKEN
        return code

    def _execute(self, body: CodeType, last: CodeType | None) -> int:
        try:
            exec(body, self._names)
            value = eval(last, self._names) if last else None
            shown = "" if value is None else repr(value) + "\n"
        except MemoryError:
            return MEMORY
        except BaseException as error:
            settrace(None)
            setprofile(None)
            _print(self._describe(error))
            return EXCEPTION
        settrace(None)
        setprofile(None)
        _print(shown)
        return OK

    def _describe(self, error: BaseException) -> str:
        """The traceback as Python prints it, with the frames of cells only."""
        lines = self._frames(error.__traceback__)
        kind = type(error).__name__
        if isinstance(error, SyntaxError) and error.filename in self._sources:
            text = (error.text or "").rstrip("\n")[:_MESSAGE_CHARS]
            lines.append(f'  File "{error.filename}", line {error.lineno}')
            if text.strip():
                indent = len(text) - len(text.lstrip())
                lines.append(f"    {text.lstrip()}")
                lines.append(" " * (4 + max(0, (error.offset or 1) - 1 - indent)) + "^")
            message = str(error.msg)
        else:
            message = _message(error)
        for folder in self._hidden:
            message = message.replace(folder + "/", "").replace(folder, "")
        if len(message) > _MESSAGE_CHARS:
            message = message[:_MESSAGE_CHARS] + " ..."
        head = ["Traceback (most recent call last):"] if lines and not isinstance(error, SyntaxError) else []
        return "\n".join([*head, *lines, f"{kind}: {message}" if message else kind]) + "\n"

    def _frames(self, traceback: TracebackType | None) -> list[str]:
        shown = []
        while traceback is not None:
            code = traceback.tb_frame.f_code
            if code.co_filename in self._sources:
                shown.append(self._frame(code, traceback.tb_lineno))
            traceback = traceback.tb_next
        if len(shown) > _FRAMES_SHOWN:
            half = _FRAMES_SHOWN // 2
            shown = [*shown[:half], f"  ... {len(shown) - 2 * half} more ...", *shown[-half:]]
        return shown

    def _frame(self, code: CodeType, line: int | None) -> str:
        source = self._sources[code.co_filename]
        text = source[line - 1].strip()[:200] if line and line <= len(source) else ""
        return f'  File "{code.co_filename}", line {line}, in {code.co_name}' + (
            f"\n    {text}" if text else ""
        )


def _limit_cpu(seconds: int) -> None:
    """Lowers the limit of processor time to ``seconds`` from now, rounded up."""
    usage = getrusage(RUSAGE_SELF)
    value = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    value = min(value, getrlimit(RLIMIT_CPU)[1])
    setrlimit(RLIMIT_CPU, (value, value))


def _compile(source: str, name: str) -> tuple[CodeType, CodeType | None]:
    """The cell's statements, and its last line if that is an expression."""
    tree = compile(source, name, "exec", _ONLY_AST, dont_inherit=True)
    last = None
    if tree.body and isinstance(tree.body[-1], _ASTExpr):
        last = compile(_Expression(tree.body.pop().value), name, "eval", dont_inherit=True)
    return compile(tree, name, "exec", dont_inherit=True), last


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except MemoryError:
        raise
    except BaseException:
        return "(its message cannot be shown)"


def _same(descriptor: int, expected: Any) -> bool:
    try:
        now = fstat(descriptor)
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == (expected.st_dev, expected.st_ino)


def _print(text: str) -> None:
    """Writes to the real standard output, after what the cell left in the buffers."""
    for stream in (sys.stdout, sys.stderr, _stdout, _stderr):
        try:
            stream.flush()
        except MemoryError:
            raise
        except BaseException:
            continue  # a cell may have closed or replaced it
    data = text.encode("utf-8", "backslashreplace")
    while data:
        try:
            data = data[write(1, data) :]
        except OSError:
            return  # closed by the cell: the check after the cell says so
