"""Files in folders where others may write, and files that others may have made.

Who may write into a folder can put a symbolic link, or a named pipe, where a file is expected: a
link leads to a file of this user, which would be overwritten, and a pipe has a reader wait without
end. So files are written under a random name that did not exist, and then renamed, which replaces a
link and does not follow it. Only plain files are read, up to a size.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_RANDOM_BYTES = 8


@contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Opens a new file that takes the place of ``path`` at the end of the block, or not at all.

    Whatever has that name is replaced, and never followed. A reader never finds a part of the file.

    Args:
        path: The final name.
        mode: ``"wb"``, or ``"w"`` for text.

    Raises:
        OSError: The file cannot be written.
    """
    unfinished = f"{os.fspath(path)}.{secrets.token_hex(_RANDOM_BYTES)}.new"
    descriptor = os.open(unfinished, _NEW, 0o666)  # The mask of the process applies.
    try:
        with open(descriptor, mode) as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def open_plain(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a file to read it; does not wait for a writer of a pipe.

    Raises:
        OSError: There is no such file, or it is a folder, a pipe or a device.
    """
    descriptor = os.open(path, _READ)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Is no plain file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """Returns the content of a plain file.

    Raises:
        OSError: There is no such file, it is no plain file, or it is larger than the limit.
    """
    with open_plain(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"Has more than {limit_bytes} bytes")
    return content
