"""Folders of ``torch.distributed.checkpoint``, written from snapshots, and restored from.

An entry ``model/layers/0`` of a state has its tensors there as ``model.layers.0.weight``, as in a
folder that a program without RPC saved of ``{"model": model.state_dict()}``. A folder that
``to_dcp`` wrote has all else of the snapshot, too, as JSON in entries that begin with ``weft.``.

The index of a folder is a pickle, and so are its values that are no tensors. They are read by
unpicklers that know only the classes of torch which such a folder needs.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from torchweft.checkpoint import files, snapshots
from torchweft.checkpoint.encoding import decode_part
from torchweft.checkpoint.files import Written
from torchweft.checkpoint.kinds import FOREIGN, Content
from torchweft.checkpoint.snapshots import EntryRecord, Manifest, PartRecord, Snapshot
from torchweft.errors import CheckpointError
from torchweft.files import open_plain

METADATA = ".metadata"
"""The index of a folder: its presence tells such a folder."""
_OWN = "weft"
_MANIFEST, _HEADS = f"{_OWN}.manifest", f"{_OWN}.heads"


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is a folder of ``torch.distributed.checkpoint``."""
    return isinstance(path, (str, os.PathLike)) and os.path.exists(os.path.join(path, METADATA))


def to_dcp(snapshot: Snapshot, folder: str | os.PathLike[str]) -> None:
    """Writes a snapshot as a folder of ``torch.distributed.checkpoint``. Blocks; needs no group.

    ``torch.distributed.checkpoint.load`` finds a module of the state by its name. ``restore``
    accepts the folder as well, with all that the snapshot has.

    Args:
        snapshot: The snapshot, all of whose files this process can read.
        folder: The folder to write; it must not have a checkpoint.

    Raises:
        CheckpointError: A file is missing or damaged, or the folder cannot be written.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    with snapshots.named_errors("writing the folder", os.fspath(folder), snapshot.step):
        if is_folder(folder):
            raise FileExistsError("there is a checkpoint already")
        state = _as_state_dict(snapshot)
        planner, writer = DefaultSavePlanner(flatten_state_dict=False), FileSystemWriter(folder)
        planner.set_up_planner(state, None, True)
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        plans = writer.prepare_global_plan(plans)
        results = writer.write_data(planner.finish_plan(plans[0]), planner).wait()
        writer.finish(metadata, [results])


def _as_state_dict(snapshot: Snapshot) -> dict[str, Any]:
    """Returns all tensors of a snapshot by their names in a folder, and the rest as JSON."""
    manifest = snapshots.read_manifest_of(snapshot)
    state: dict[str, Any] = {}
    for part in manifest.parts:
        path = snapshots.part_path(snapshot.directory, snapshot.name, part.file)
        if problem := files.difference(path, Written(part.size_bytes, part.sha256)):
            raise snapshots.corrupt(snapshot, path, "", problem)
        with safe_open(path, framework="pt") as file:
            head = json.loads(file.metadata()[files.HEAD])
            names = {}
            for name in file.keys():  # noqa: SIM118  # It is no dict.
                own = f"{_OWN}.{part.worker}.{_dotted(name)}"
                names[name] = own if _dotted(name) in state else _dotted(name)
                state[names[name]] = file.get_tensor(name)
        state[f"{_HEADS}.{part.worker}"] = json.dumps({"head": head, "names": names})
    state[_MANIFEST] = manifest.to_bytes().decode()
    return state


def _dotted(name: str) -> str:
    return name.replace("/", ".").replace(":", ".")


# Reading


def read_manifest(folder: str, paths: Iterable[str]) -> Manifest:
    """Returns the manifest of the snapshot that a folder was written from, or one like it.

    Args:
        folder: The folder.
        paths: The paths of the entries that are looked for in a folder of another program.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        index = _index_of(folder)
        if _MANIFEST in index.state_dict_metadata:
            text = _read(folder, index, [_MANIFEST])[_MANIFEST]
            manifest = snapshots.read_manifest(text.encode())
            parts = [
                PartRecord(each.worker, each.rank, METADATA, 0, each.worker, True)
                for each in manifest.parts
            ]
            return Manifest(**{**vars(manifest), "parts": parts})
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"reading the folder {folder} failed: {error}", directory=folder
        ) from error
    found = [path for path in paths if _names_in(index, path)]
    return Manifest(
        step=0,
        written="",
        driver=METADATA,
        workers=[],
        parts=[PartRecord(METADATA, 0, METADATA, 0, "", True)],
        items={path: EntryRecord(FOREIGN, METADATA) for path in found},
        versions={},
    )


def read_part(folder: str, worker: str, wanted: list[str]) -> Content:
    """Returns the wanted entries of a folder.

    Args:
        folder: The folder.
        worker: The name of the worker whose part has them; empty in a folder of another program.
        wanted: The entries.

    Raises:
        OSError: It cannot be read.
        ValueError: It does not have the entries.
    """
    index = _index_of(folder)
    if not worker:
        items: Content = {}
        for path in wanted:
            names = _names_in(index, path)
            values = _read(folder, index, list(names.values()))
            state = {within: values[name] for within, name in names.items()}
            items[path] = {"kind": FOREIGN, "state": state}
        return items
    entry = f"{_HEADS}.{worker}"
    described = json.loads(_read(folder, index, [entry])[entry])

    def tensor_of(name: str) -> Tensor:
        found: Tensor = _read(folder, index, [described["names"][name]]).popitem()[1]
        return found

    return decode_part(described["head"], wanted, tensor_of)


def _names_in(index: Any, path: str) -> dict[str, str]:
    """Returns the names of an entry's values in a folder, by their names within the entry."""
    dotted = _dotted(path)
    if dotted in index.state_dict_metadata:
        return {"": dotted}
    prefix = f"{dotted}."
    names = [name for name in index.state_dict_metadata if name.startswith(prefix)]
    return {name.removeprefix(prefix): name for name in names}


def _read(folder: str, index: Any, names: list[str]) -> dict[str, Any]:
    """Returns some values of a folder, by name; a tensor that is spread over files is put together.

    Raises:
        OSError: A file cannot be read.
        ValueError: A value is no plain value or tensor, or is not there.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    try:
        state: dict[str, Any] = {name: _empty(index.state_dict_metadata[name]) for name in names}
        planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, index, True)
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(index, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plans = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plans[0]), planner).wait()
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return state


def _empty(described: Any) -> Tensor | None:
    """Returns a tensor to read one into; None for another value."""
    size = getattr(described, "size", None)
    return None if size is None else torch.empty(size, dtype=described.properties.dtype)


def _index_of(folder: str) -> Any:
    """Returns the index of a folder.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such index.
    """
    with open_plain(os.path.join(folder, METADATA)) as file:
        try:
            index = _IndexUnpickler(file).load()
        except Exception as error:
            raise ValueError(f"{METADATA} cannot be read: {error}") from error
    if not isinstance(getattr(index, "state_dict_metadata", None), dict):
        raise ValueError(f"{METADATA} is no index of a checkpoint")
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Reads the index of a folder, and knows no other classes than those of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it has a {module}.{name}, which no index has")


_KNOWN = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
