"""Maps of parts that take a known time, and meta-steps."""

from __future__ import annotations

import functools
import io
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.frame.api import Api
from benchmarks.frame.work import Numbers, Work
from benchmarks.mapreduce import meta, parts
from benchmarks.mapreduce.question import CALLS, DEALT, EMPTY_PARTS, MANNER, ONE, PARTS

PART_S = 0.05
MAPS = 2
LENGTHS = 24
SHORTEST_S, LONGEST_S = 0.005, 0.2


def works(api: Api) -> dict[str, Work | Numbers]:
    """Returns the works of this side."""
    manner = os.environ.get(MANNER, "")
    if api.package != "torchweft" or manner == CALLS.name:
        return _calls(api)
    return _maps(api, manner)


def local_works() -> dict[str, Work | Numbers]:
    """Returns the meta-steps in one process."""
    torch.set_num_threads(1)
    return meta.works(meta.alone)


def _calls(api: Api) -> dict[str, Work | Numbers]:
    step = meta.by_calls(api.rpc, api.autograd, api.peers)

    def call_all(count: int) -> None:
        calls = [
            api.rpc.rpc_async(
                api.peers[place % len(api.peers)], parts.empty, args=(torch.tensor(place),)
            )
            for place in range(count)
        ]
        for call in calls:
            call.wait()

    return {
        "empty": Work(lambda: call_all(EMPTY_PARTS), EMPTY_PARTS),
        "single": Work(lambda: call_all(1)),
        "pair": Work(lambda: call_all(2)),
        "gap alone": Numbers(lambda: _gaps_of_calls(api)),
        **meta.works(step),
        **(_bytes(api, step) if api.package == "torchweft" else {}),
    }


def _maps(api: Api, manner: str) -> dict[str, Work | Numbers]:
    from torchweft import mapreduce

    workers = api.peers[:1] if manner == ONE.name else api.peers
    partitioner = mapreduce.dim_partitioner(0, exclusive=True, keepdim=False, workers=workers)
    step = meta.by_map(api.autograd, mapreduce, workers)

    def over(function: Callable[..., Any], values: torch.Tensor, *args: Any, **how: Any) -> Any:
        return mapreduce.remote_sync_call(
            function, args=(values, *args), partitioner=partitioner, **how
        )

    def timed(function: Callable[..., Any]) -> Work:
        values = torch.arange(PARTS)
        return Work(lambda: over(function, values, PART_S, None), PARTS)

    def empty(count: int) -> Work:
        values = torch.arange(count)
        return Work(lambda: over(parts.empty, values), count)

    def watched() -> None:
        with mapreduce.progress(out=io.StringIO(), is_terminal=True):
            over(parts.empty, many)

    def balanced(is_uneven: bool) -> Work:
        lengths = lengths_s(is_uneven)
        return Work(lambda: over(parts.sleep_for, lengths, balance=manner != DEALT.name))

    many = torch.arange(EMPTY_PARTS)
    return {
        "sleeping": timed(parts.sleep),
        "computing": timed(parts.compute),
        **{
            f"{name} {which}": Numbers(functools.partial(tell, model))
            for which, model in (("alone", None), ("model", meta.network(meta.UNITS["step"])))
            for name, tell in (
                ("gap", functools.partial(_gaps, over)),
                ("overhead", functools.partial(_overheads, over, len(workers))),
            )
        },
        "empty": empty(EMPTY_PARTS),
        "empty watched": Work(watched, EMPTY_PARTS),
        "single": empty(1),
        "pair": empty(2),
        "random": balanced(False),
        "uneven": balanced(True),
        **meta.works(step),
        **_bytes(api, step),
    }


def lengths_s(is_uneven: bool) -> torch.Tensor:
    """Returns the lengths of parts: most are short, few are long.

    Args:
        is_uneven: Whether one worker is dealt all the long parts.
    """
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(LENGTHS, generator=generator) ** 2
    if is_uneven:
        spread = spread.sort().values.view(2, -1).T.flatten()
    return SHORTEST_S + (LONGEST_S - SHORTEST_S) * spread


class _Ends:
    """Records when the parts of a map have ended."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[int, float]]] = {}

    def ended(self, map_id: int, part: int, worker: str, seconds: float) -> None:
        self.of.setdefault(worker, []).append((part, time.perf_counter()))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def _gaps(over: Callable[..., Any], model: torch.nn.Module | None) -> list[float]:
    """Returns, for each part, the time since its worker's previous part ended, minus its sleep."""
    from torchweft.mapreduce.observers import watching

    over(parts.sleep, torch.arange(2), 0.0, model)  # Warm-up: all were stopped until now.
    ends = _Ends()
    watching.append(ends)
    try:
        begin = time.perf_counter()
        slept = over(parts.sleep, torch.arange(PARTS), PART_S, model)
    finally:
        watching.remove(ends)
    gaps = []
    for ended in ends.of.values():
        before = begin
        for part, end in ended:
            gaps.append(end - before - slept[part])
            before = end
    return gaps


def _gaps_of_calls(api: Api) -> list[float]:
    """Returns the same for calls, each made after the answer to the previous call."""
    gaps = []
    for place in range(PARTS):
        begin = time.perf_counter()
        slept = api.rpc.rpc_sync(
            api.peers[0], parts.sleep, args=(torch.tensor(place), PART_S, None)
        )
        gaps.append(time.perf_counter() - begin - slept)
    return gaps


def _overheads(
    over: Callable[..., Any], workers: int, model: torch.nn.Module | None
) -> list[float]:
    """Returns how much longer than necessary each map takes, divided by its number of parts."""

    def overhead() -> float:
        begin = time.perf_counter()
        slept: list[float] = over(parts.sleep, torch.arange(PARTS), PART_S, model)
        return (time.perf_counter() - begin - sum(slept) / workers) / PARTS

    overhead()  # Warm-up: all processes were stopped until now.
    return [overhead() for _ in range(MAPS)]


def _bytes(api: Api, step: meta.Step) -> dict[str, Work | Numbers]:
    def moved(units: int) -> list[float]:
        model = meta.network(units)
        step(model)
        before = api.rpc.traffic()
        step(model)
        after = api.rpc.traffic()
        return [float(sum(after) - sum(before))]

    return {
        f"{name} bytes": Numbers(functools.partial(moved, units))
        for name, units in meta.UNITS.items()
    }
