"""A fresh process for each measurement, forked from one that has done nothing but import."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from gattn_viz.errors import first_line

OK = "ok"
DOES_NOT_FIT = "does not fit"
NOT_INSTALLED = "not installed"

_context = get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "transformers.models.qwen3.modeling_qwen3", "gattn_viz.capture.run", "benchmarks.contenders"]
)


def call_in_process(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """Call a function of a module in a process of its own.

    Returns:
        a status and what it returned: ("ok", value), or what went wrong and None.
    """
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=_child, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        outcome: tuple[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        return f"failed: its process ended with {process.exitcode}", None
    except BaseException:
        process.kill()
        raise
    process.join()
    return outcome


def _child(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # nobody shall ask the Hub for a model that is made here
    try:
        sender.send((OK, function(*arguments)))
    except Exception as error:
        status = status_of(error)
        if status != DOES_NOT_FIT:
            traceback.print_exc(file=sys.stderr)
        sender.send((status, None))


def status_of(error: Exception) -> str:
    """What to write into the table: `does not fit`, or the error's first line."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return DOES_NOT_FIT
    return f"failed: {type(error).__name__}: {first_line(error)}"
