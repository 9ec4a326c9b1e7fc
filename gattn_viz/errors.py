"""The one error that a person is meant to read."""

from __future__ import annotations


class GattnVizError(Exception):
    """Something the person who called can put right.

    The message is one line: what is wrong, what was passed, what was expected, what to do. The command line
    prints it alone and exits with 1; a notebook shows it as any exception.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def first_line(error: BaseException) -> str:
    """The first non-empty line of an exception's message, to quote inside a one-line error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
