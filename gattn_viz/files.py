"""Writing files so that nothing that was there is lost."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gattn_viz.errors import GattnVizError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path`, which takes its place if the block ends well and is removed if not.

        with replacing("sinks.csv") as temporary:
            frame.to_csv(temporary)

    Missing directories are made. A symbolic link is followed: the file behind it is replaced. What `is_stream`
    says is one is never replaced: the block's file is copied into it.

    Raises:
        GattnVizError: the file cannot be written.
        BrokenPipeError: the reader of a pipe has gone.
    """
    temporary: Path | None = None
    try:
        special = is_stream(path)
        target = Path(os.path.realpath(os.path.expanduser(path)))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        directory = Path(tempfile.gettempdir()) if special else target.parent
        directory.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode if target.exists() else 0o666 & ~_umask()
        descriptor, name = tempfile.mkstemp(prefix=f".{target.stem[:20]}-", suffix=target.suffix, dir=directory)
        os.close(descriptor)
        temporary = Path(name)
        yield temporary
        if special:
            with temporary.open("rb") as source, open(os.path.expanduser(path), "ab") as sink:
                shutil.copyfileobj(source, sink)
        else:
            temporary.chmod(mode & 0o777)
            temporary.replace(target)
            temporary = None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise GattnVizError(
            f"cannot write {path}: {error.strerror or error}; expected a place that can be written to: "
            "name another"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is written to and not replaced: a pipe, a device, or an open file such as /dev/stdout."""
    path = Path(os.path.expanduser(path))
    if re.fullmatch(r"/dev/(stdout|stderr|fd/\d+)|/proc/[^/]+/fd/\d+", os.path.abspath(path)):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return umask
