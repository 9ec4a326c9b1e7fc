"""What a person is told on stderr: messages, warnings and progress. Data goes to stdout or files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("gattn_viz")

debug = False
"""Whether errors show their traceback."""


class _ToStderr(logging.Handler):
    """Writes to the stderr of the moment, which a progress bar exchanges for its own."""

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        print(mark + self.format(record), file=sys.stderr)


def start() -> None:
    """Show the package's messages on stderr."""
    if not log.handlers:
        log.addHandler(_ToStderr())
    log.setLevel(logging.INFO)
    log.propagate = False


def set_quiet(quiet: bool) -> bool:
    """Leave out everything but errors. The value is given back: an option's callback says what the option is."""
    if quiet:
        log.setLevel(logging.ERROR)
    return quiet


def set_debug(on: bool) -> bool:
    """Show tracebacks."""
    global debug
    debug = debug or on
    return on


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, one line a model, gone when done; nothing unless stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda what, done, steps: None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        tasks = {}

        def update(what: str, done: int, steps: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=steps)
            bar.update(tasks[what], completed=done)

        yield update
