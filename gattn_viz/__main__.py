"""`gattn-viz`, and `python -m gattn_viz`."""

from __future__ import annotations

import io
import os
import signal
import sys

from gattn_viz.cli import messages
from gattn_viz.cli.app import app
from gattn_viz.errors import GattnVizError, first_line


def main() -> None:
    """Run the command line: exit code 0 for done, 1 for failed with one line that says why, 2 for wrong use."""
    messages.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a token shows its code
    try:
        app(prog_name="gattn-viz")
    except GattnVizError as error:
        _fail(str(error), error)
    except BrokenPipeError:
        # the reader has gone, as `| head` does; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(
            f"{first_line(error)}; expected to be allowed to read and write there: name another place",
            error,
        )
    except MemoryError as error:
        _fail("not enough memory; expected room for what was asked: lower --dpi, or ask for fewer maps", error)
    except Exception as error:
        _fail(
            f"unexpected {type(error).__name__}: {first_line(error)}; run it again with --debug for the "
            "traceback, and please report it",
            error,
        )


def _fail(message: str, error: Exception) -> None:
    if messages.debug:
        raise error
    print(f"gattn-viz: error: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
