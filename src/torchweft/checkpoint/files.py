"""Files of a snapshot: complete or absent, known by their hash, and readable by any tool.

The part of a worker is a safetensors file. Its head is JSON in the entry ``weft`` of the file's
metadata; see ``encoding``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from torchweft.checkpoint.encoding import FILE_TYPES, Part, decode_part
from torchweft.checkpoint.kinds import Content
from torchweft.files import open_plain

UNFINISHED = ".tmp"
"""The suffix of a file's name until all of the file is on the disk."""
HEAD = "weft"
"""The entry of a safetensors file's metadata that has all that is no tensor."""
_CHUNK_BYTES = 4 << 20
_HEAD_LIMIT_BYTES = 90_000_000
"""Readers of safetensors accept headers of 100 MB, with the names of the tensors."""


class Written(NamedTuple):
    """The identity of a file's content: its size, and the SHA-256 of its bytes."""

    size_bytes: int
    sha256: str


def write_whole(path: str, write: Callable[[str], object]) -> Written:
    """Writes a file under a temporary name, waits until it is on the disk, and renames it.

    A file ``path`` is always complete, whenever this process or the machine stops.

    Args:
        path: The final name.
        write: Makes the file of the given name, which nobody can guess: so it follows no link.

    Raises:
        OSError: The disk is full, or another error. There is no file then, unless only the
            directory could not be flushed.
    """
    unfinished = f"{path}.{secrets.token_hex(8)}{UNFINISHED}"
    try:
        write(unfinished)
        flush(unfinished)
        written = read_identity(unfinished)
        rename(unfinished, path)
    except BaseException:
        remove_file(unfinished)
        raise
    flush(os.path.dirname(path))
    return written


def write_bytes(path: str, data: bytes) -> Written:
    """Writes bytes, whole; see ``write_whole``."""

    def write(unfinished: str) -> None:
        with open(unfinished, "xb") as file:
            file.write(data)

    return write_whole(path, write)


def write_part(path: str, part: Part) -> Written:
    """Writes a part, whole; see ``write_whole``.

    Raises:
        ValueError: The part has more plain values than the header of a file may have.
    """
    text = json.dumps(part.head)
    if len(text) > _HEAD_LIMIT_BYTES:
        raise ValueError(
            f"the plain values of this worker's part take {len(text):,} bytes of JSON, and a file "
            f"holds at most {_HEAD_LIMIT_BYTES:,}; save long histories as tensors"
        )
    return write_whole(
        path, lambda unfinished: save_tensors(part.tensors, unfinished, {HEAD: text})
    )


def save_tensors(tensors: dict[str, Tensor], path: str, metadata: dict[str, str]) -> None:
    """Writes a safetensors file: the size of its header, the header, and the bytes of the tensors.

    The writer of the library makes files that only this user may read.

    Args:
        tensors: Contiguous tensors in host memory, of ``FILE_TYPES``.
        path: The file, which must not exist.
        metadata: The texts of the header beside the tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # So all are aligned.
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        header[name] = {
            "dtype": FILE_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            # Copied if it has one element only: its strides may be anything.
            flat = tensors[name].reshape(-1)
            whole = torch.cat([flat]) if flat.numel() < 2 else flat
            data: Any = whole.view(torch.uint8).numpy()
            file.write(data)


def flush(path: str) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(unfinished: str, path: str) -> None:
    """Renames a finished file to its final name, replacing any existing file."""
    os.replace(unfinished, path)


def remove_file(path: str) -> None:
    """Removes a file if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def read_identity(path: str) -> Written:
    """Returns the size and hash of a file.

    Raises:
        OSError: There is no such file, or it cannot be read.
    """
    digest, size_bytes = hashlib.sha256(), 0
    with open_plain(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    return Written(size_bytes, digest.hexdigest())


def difference(path: str, expected: Written) -> str:
    """Returns a description of a file's damage; empty if the file is as it was written.

    Raises:
        FileNotFoundError: There is no such file.
    """
    found = read_identity(path)
    if found.size_bytes != expected.size_bytes:
        return f"it has {found.size_bytes:,} bytes, {expected.size_bytes:,} were written"
    if found.sha256 != expected.sha256:
        return "its bytes are not those that were written (SHA-256 differs)"
    return ""


def read_part(path: str, wanted: Iterable[str]) -> Content:
    """Returns copies of the wanted entries of a part.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no part of a snapshot, or does not have the entries.
    """
    try:
        with safe_open(path, framework="pt") as file:
            # Copies: the file may be removed before the entries are put in place.
            return decode_part(
                json.loads(file.metadata()[HEAD]),
                wanted,
                lambda name: file.get_tensor(name).clone(),
            )
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"it is no part of a snapshot ({type(error).__name__}: {error})"
        ) from error
