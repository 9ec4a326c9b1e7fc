"""Writing files so that nothing that was there is lost."""

from __future__ import annotations

import errno
import os
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

    Missing directories are made. A symbolic link is followed: the file behind it is replaced. What is no regular
    file, such as /dev/null or a named pipe, is never replaced: the block's file is copied into it.

    Raises:
        GattnVizError: the file cannot be written.
    """
    temporary: Path | None = None
    try:
        target = Path(os.path.realpath(os.path.expanduser(path)))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        special = target.exists() and not target.is_file()
        directory = Path(tempfile.gettempdir()) if special else target.parent
        directory.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode if target.exists() else 0o666 & ~_umask()
        descriptor, name = tempfile.mkstemp(prefix=f".{target.stem[:20]}-", suffix=target.suffix, dir=directory)
        os.close(descriptor)
        temporary = Path(name)
        yield temporary
        if special:
            with temporary.open("rb") as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        else:
            temporary.chmod(mode & 0o777)
            temporary.replace(target)
            temporary = None
    except OSError as error:
        raise GattnVizError(
            f"cannot write {path}: {error.strerror or error}; expected a place that can be written to: "
            "name another"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return umask
