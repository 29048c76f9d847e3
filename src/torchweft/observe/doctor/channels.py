"""Checks each pair of workers: whether they reach each other, how fast, and which way; pure."""

from __future__ import annotations

from collections.abc import Iterator

from torchweft import knobs
from torchweft.channel.choice import NO_CUDA, UNTRIED
from torchweft.channel.rdma import NO_DEVICE
from torchweft.observe.doctor.findings import Finding, Level
from torchweft.protocol.observing.facts import PairFacts

_SHARED, _DEVICES, _REMOTE = "shm", "cuda_ipc", "rdma"


def check_pair(pair: PairFacts) -> Iterator[Finding]:
    """Yields the rates of a pair, the channels it uses, and why it does not use a better one."""
    where = pair.where
    if pair.is_busy:
        text = f"is not measured, as {pair.callee} is busy: {pair.error}"
        fix = f"torchweft top --worker {pair.callee} shows what it does"
        yield Finding(Level.NOTE, "pair", where, text, fix)
        return
    if pair.error:
        fix = "open the ports of workers in the firewall; WEFT_LISTEN sets the address"
        yield Finding(Level.ERROR, "pair", where, f"cannot be called: {pair.error}", fix)
        return
    if pair.latency_s:
        text = (
            f"{pair.latency_s * 1e6:.0f} us a call, {pair.bytes_per_s / 1e9:.1f} GB/s of a tensor "
            f"({_limit(pair)}); channels: {_channels(pair)}"
        )
        yield Finding(Level.GOOD, "pair", where, text)
    else:
        yield Finding(Level.GOOD, "channel", where, f"channels: {_channels(pair)}")
    obstacles = dict(pair.obstacles)
    for name in ("shm", "cma", _DEVICES) if pair.is_one_host else (_REMOTE,):
        reason = obstacles.get(name, "")
        if reason and reason != UNTRIED and NO_CUDA not in reason and NO_DEVICE not in reason:
            yield Finding(Level.NOTE, "channel", where, f"no {name}: {reason}", _fix(name, reason))


def _channels(pair: PairFacts) -> str:
    """Returns from which size on a tensor takes which channel, and where it goes without room."""
    starts = sorted({pair.inline_bytes, *(each for _, each in pair.channels)})
    taken = {"inline": 0}
    for start in starts:
        fitting = (name for name, least in pair.channels if start >= least)
        taken.setdefault(next(fitting, "stream"), start)
    told = ", ".join(
        f"{name} from {_size(start)}" if start else name for name, start in taken.items()
    )
    others = [(name, least) for name, least in pair.channels if name != _SHARED]
    if _SHARED in taken and others:
        told += " (where it has no room: "
        told += ", ".join(f"{name} from {_size(least)}" for name, least in others) + ")"
    if dict(pair.obstacles).get(_DEVICES) == "":
        told += f", {_DEVICES} between GPUs"
    return told


def _limit(pair: PairFacts) -> str:
    """Returns what limits the rate of a pair: memory, or the network between its hosts."""
    if pair.is_one_network:
        return f"{pair.memory_bytes_per_s / 1e9:.1f} GB/s is a copy in memory"
    if pair.interface_bytes_per_s:
        return f"{pair.interface_bytes_per_s / 1e9:.3g} GB/s is the speed of {pair.interface}"
    return f"{pair.interface or 'the network between'} does not tell its speed"


def _fix(name: str, reason: str) -> str:
    """Returns the command against an obstacle, where one is known."""
    if "ptrace" in reason:
        return "sysctl kernel.yama.ptrace_scope=0, or in a container --cap-add=SYS_PTRACE"
    if "namespace" in reason:
        return "start both containers with --pid=host or --pid=container:NAME"
    if "runs as user" in reason:
        return "start both workers as the same user"
    for knob in (knobs.CUDA_IPC, knobs.RDMA):
        if f"{knob.variable}=0" in reason:
            return f"unset {knob.variable}, and start the workers again"
    if name == _REMOTE and "comes with" in reason:
        return f"pip install 'torch>={reason.rpartition(' ')[2]}'"
    return "unset WEFT_SHM_LIMIT_BYTES" if name == _SHARED and "no shared memory" in reason else ""


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
