"""The manifest: the files of a snapshot, their entries, and the workers that wrote them.

It is JSON, so that a person can read it. It is written last; a directory without a manifest is not
a snapshot.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from torchweft.checkpoint.files import Written

FORMAT = 1


class BadManifest(ValueError):
    """A manifest is not as it was written, or of another version of the format."""


@dataclass(frozen=True)
class Part:
    """The file of one worker.

    Attributes:
        worker: The name of the worker that wrote it.
        rank: Its rank.
        file: The name of the file in the snapshot's directory.
        size_bytes: Its size.
        sha256: The SHA-256 of its bytes.
        is_seen: Whether the driver saw the file as well, so the directory is on shared storage.
    """

    worker: str
    rank: int
    file: str
    size_bytes: int
    sha256: str
    is_seen: bool

    @property
    def written(self) -> Written:
        """The size and hash of the file."""
        return Written(self.size_bytes, self.sha256)


@dataclass(frozen=True)
class Item:
    """One entry of the state.

    Attributes:
        kind: Its kind; see ``kinds``.
        worker: The name of the worker whose file contains it.
    """

    kind: str
    worker: str


@dataclass(frozen=True)
class Parameter:
    """One parameter of a distributed optimizer.

    Attributes:
        name: Its name in every snapshot of the same state; see ``parts.parameter_names``.
        group: The number of its parameter group.
        shape: Its shape.
        worker: The name of the worker whose file contains the optimizer's state of it.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    worker: str


@dataclass(frozen=True)
class Manifest:
    """The description of a snapshot, available without reading its parts.

    Attributes:
        step: How many steps of the training had been done.
        written: The time of writing, in UTC, in the form of ISO 8601.
        driver: The name of the worker that saved it.
        workers: The names of all workers of the group at that time, by rank.
        parts: The files, by rank of their workers.
        items: The entries of the state, by path.
        optimizers: The parameters of distributed optimizers in order, by path.
        random: The names of the workers whose random number generators are in it.
        versions: The versions of Weft, PyTorch and Python that wrote it.
    """

    step: int
    written: str
    driver: str
    workers: list[str]
    parts: list[Part]
    items: dict[str, Item]
    optimizers: dict[str, list[Parameter]]
    random: list[str]
    versions: dict[str, str]

    def part_of(self, worker: str) -> Part:
        """Returns the file that a worker wrote."""
        return next(part for part in self.parts if part.worker == worker)

    def to_bytes(self) -> bytes:
        """Returns the manifest as JSON, with its own hash."""
        content = dataclasses.asdict(self)
        whole = {"format": FORMAT, "sha256": _hash(content), "snapshot": content}
        return json.dumps(whole, indent=1).encode() + b"\n"


def read_manifest(data: bytes) -> Manifest:
    """Returns a manifest from the bytes that ``to_bytes`` returned.

    Raises:
        BadManifest: The bytes were changed, or are of another version of the format.
    """
    try:
        whole = json.loads(data)
        version, content = whole["format"], whole["snapshot"]
        if version != FORMAT:
            raise BadManifest(
                f"it has version {version!r} of the format, and this Weft reads {FORMAT}"
            )
        if whole["sha256"] != _hash(content):
            raise BadManifest("its content is not what was written (SHA-256 differs)")
        return _manifest(content)
    except BadManifest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadManifest(f"it is no manifest ({type(error).__name__}: {error})") from error


def _manifest(content: dict[str, Any]) -> Manifest:
    return Manifest(
        **{
            **content,
            "parts": [Part(**part) for part in content["parts"]],
            "items": {path: Item(**item) for path, item in content["items"].items()},
            "optimizers": {
                path: [_parameter(each) for each in parameters]
                for path, parameters in content["optimizers"].items()
            },
        }
    )


def _parameter(content: dict[str, Any]) -> Parameter:
    return Parameter(**{**content, "shape": tuple(content["shape"])})


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
