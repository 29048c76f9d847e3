"""Files of a snapshot: complete or absent, known by their hash, and readable by any tool.

The part of a worker is a safetensors file. Its tensors are named after their place in the state,
as in ``model:weight`` and ``optimizer/state/model:weight/exp_avg``. Whatever is no tensor is JSON,
in the entry ``weft`` of the file's metadata. There, an object with one key that begins with ``$``
stands for a value that JSON has no form for: ``{"$tensor": "model:weight"}`` is a tensor of the
file, ``{"$tuple": [1, 2]}`` a tuple. So nothing is unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from torchweft.checkpoint.kinds import MODULE, PARAMETER, Content
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


def write_part(path: str, content: Content) -> Written:
    """Writes a part, whole; see ``write_whole``.

    Raises:
        ValueError: The part has more plain values than the header of a file may have.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode_part(content, tensors))
    if len(text) > _HEAD_LIMIT_BYTES:
        raise ValueError(
            f"the plain values of this worker's part take {len(text):,} bytes of JSON, and a file "
            f"holds at most {_HEAD_LIMIT_BYTES:,}; save long histories as tensors"
        )
    return write_whole(path, lambda unfinished: save_tensors(tensors, unfinished, {HEAD: text}))


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


# Parts as JSON


def encode_part(content: Content, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Returns a part as JSON; adds its tensors to ``tensors``, by name."""
    encoder = _Encoder(tensors)
    head = {}
    for path, item in content.items():
        state = item["state"]
        if item["kind"] in (MODULE, PARAMETER):  # The names of their tensors are the shorter.
            separator = ":" if item["kind"] == MODULE else "/"
            node = {
                key: encoder.encode(each, path) for key, each in state.items() if key != "state"
            }
            node["state"] = encoder.encode(state["state"], path, separator)
        else:
            node = encoder.encode(state, path.lstrip("/"))
        head[path] = {"kind": item["kind"], "state": node}
    return head


def decode_part(
    head: dict[str, Any], wanted: Iterable[str], tensor_of: Callable[[str], Tensor]
) -> Content:
    """Returns the wanted entries of a part; see ``decode``."""
    return {
        path: {"kind": head[path]["kind"], "state": decode(head[path]["state"], tensor_of)}
        for path in wanted
    }


FILE_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The types that every reader of safetensors knows, by their names there. Tensors of others are
written as bytes."""


class _Encoder:
    """Writes values as JSON, and collects their tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._names: dict[int, str] = {}

    def encode(self, value: Any, at: str, separator: str = "/") -> Any:
        """Returns a value as JSON.

        Args:
            value: Tensors and plain values.
            at: The name of the value, from which those of its tensors are made.
            separator: Stands between the name and a key.
        """
        kind = type(value)
        if kind is Tensor:
            return self._tensor(value, at)
        if kind is list:
            return [self.encode(each, f"{at}/{place}") for place, each in enumerate(value)]
        if isinstance(value, dict):
            pairs = [
                [self.encode(key, at), self.encode(each, f"{at}{separator}{key}")]
                for key, each in value.items()
            ]
            is_object = all(type(key) is str and not key.startswith("$") for key in value)
            return dict(pairs) if kind is dict and is_object else {f"${kind.__name__}": pairs}
        if kind in _FORMS:
            plain, _ = _FORMS[kind]
            return {f"${kind.__name__}": self.encode(plain(value), at)}
        # Decimal numbers of many digits are slow, and limited.
        if (kind is int and value.bit_length() > 64) or (kind is float and not isfinite(value)):
            return {f"${kind.__name__}": hex(value) if kind is int else str(value)}
        return value

    def _tensor(self, tensor: Tensor, at: str) -> dict[str, Any]:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce()
            parts = [tensor.indices(), tensor.values(), tensor.shape]
            return {"$sparse": self.encode(parts, at)}
        form: dict[str, Any] = {"$tensor": self._add(tensor, at)}
        if not tensor.is_contiguous():
            form["stride"] = list(tensor.stride())
        if tensor.dtype not in FILE_TYPES:
            form["dtype"] = _name_of(tensor.dtype)
        return form

    def _add(self, tensor: Tensor, at: str) -> str:
        """Adds a tensor if it is a new one; returns its name."""
        name = self._names.get(id(tensor))
        if name is None:
            name, count = at, 1
            while name in self._tensors or name == "__metadata__":  # which readers take for theirs
                count += 1
                name = f"{at}#{count}"
            whole = tensor.resolve_conj().resolve_neg().contiguous()
            if whole.dtype not in FILE_TYPES:
                whole = whole.unsqueeze(-1).view(torch.uint8)
            self._names[id(tensor)], self._tensors[name] = name, whole
        return name


def decode(node: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """Returns the value of JSON that ``encode_part`` made.

    Args:
        node: The JSON.
        tensor_of: Returns a tensor of the file.

    Raises:
        ValueError: It was not made so.
    """
    if isinstance(node, list):
        return [decode(each, tensor_of) for each in node]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), "")
    if not tag:
        return {key: decode(each, tensor_of) for key, each in node.items()}
    if tag == "$tensor":
        return _tensor_of(node, tensor_of)
    if tag not in _MAKERS:
        raise ValueError(f"it has a value of the unknown form {tag}")
    return _MAKERS[tag](decode(node[tag], tensor_of))


def _tensor_of(node: dict[str, Any], tensor_of: Callable[[str], Tensor]) -> Tensor:
    tensor = tensor_of(node["$tensor"])
    if "dtype" in node:
        tensor = tensor.view(_type_of(node["dtype"])).squeeze(-1)
    if "stride" in node:
        spread = torch.empty_strided(tensor.shape, node["stride"], dtype=tensor.dtype)
        tensor = spread.copy_(tensor)
    return tensor


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"it has the unknown type {name}")
    return found


_FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    set: (list, set),
    torch.Size: (list, torch.Size),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    torch.dtype: (_name_of, _type_of),
    torch.device: (str, torch.device),
}
"""The types that JSON has no form for: how values become plainer ones, and are made of them."""

_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{f"${kind.__name__}": make for kind, (_, make) in _FORMS.items()},
    "$dict": dict,
    "$OrderedDict": OrderedDict,
    "$Counter": lambda pairs: Counter(dict(pairs)),
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$sparse": lambda parts: torch.sparse_coo_tensor(*parts, check_invariants=True).coalesce(),
}
