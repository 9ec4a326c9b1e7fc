"""`gattn-viz`, and `python -m gattn_viz`."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress

from gattn_viz.errors import GattnVizError, first_line

OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "bad allocation")


def main() -> None:
    """Run the command line: exit code 0 for done, 1 for failed with one line that says why, 2 for wrong use."""
    try:
        _run()
    except GattnVizError as error:
        _fail(str(error), error)
    except BrokenPipeError:
        # the reader has gone, as `| head` does
        _forget_stdout()
        sys.exit(1)
    except OSError as error:
        _forget_stdout()
        _fail(
            f"{first_line(error)}; expected to be allowed to read and write there: name another place",
            error,
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY):
            _fail(f"not enough memory ({first_line(error)[:200]}); {_memory_advice()}", error)
        _fail(
            f"unexpected {type(error).__name__}: {first_line(error)}; run it again with --debug for the "
            "traceback, and please report it",
            error,
        )


def _run() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import may swallow a KeyboardInterrupt
    from gattn_viz.cli import messages
    from gattn_viz.cli.app import app

    signal.signal(signal.SIGINT, before)
    messages.start()
    _exit_on_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a token shows its code
    if sys.stdout is not None and isinstance(sys.stdout.buffer, io.RawIOBase):
        # with PYTHONUNBUFFERED, where a write may write less than all and nobody would know
        buffered = io.BufferedWriter(sys.stdout.buffer)
        sys.stdout = io.TextIOWrapper(
            buffered, sys.stdout.encoding, sys.stdout.errors, line_buffering=sys.stdout.isatty()
        )
    try:
        app(prog_name="gattn-viz")
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def _exit_on_signals() -> None:
    """End as by an exception, so that temporary files are removed; what is ignored, as by nohup, stays so."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _forget_stdout() -> None:
    """Nothing may be written at exit either, which would fail again."""
    with suppress(AttributeError, OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _memory_advice() -> str:
    """What to lower, by the command that ran."""
    if "maps" in sys.argv:
        lower, fewer = "--max-cells, --max-tokens, --chunk or --dpi", "--layers or --heads"
    else:
        lower, fewer = "--batch-size, --max-tokens or --chunk", "--measures"
        if "--ci" in sys.argv:
            lower = f"--resamples, {lower}"
    return (
        f"expected room for what was asked: lower {lower}, ask for fewer {fewer}, or load the model with "
        "--dtype bfloat16"
    )


def _fail(message: str, error: Exception) -> None:
    from gattn_viz.cli import messages

    if messages.debug:
        raise error
    print(f"gattn-viz: error: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
