"""Checks each pair of workers: whether they reach each other, how fast, and which way; pure."""

from __future__ import annotations

from collections.abc import Iterator

from torchweft import knobs
from torchweft.channel.choice import NO_CUDA
from torchweft.channel.rdma import NO_DEVICE
from torchweft.observe.doctor.facts import PairFacts
from torchweft.observe.doctor.findings import Finding, Level

_STARTS = {
    "shm": knobs.SHM_FROM_BYTES,
    "cma": knobs.CMA_FROM_BYTES,
    "striped": knobs.STRIPED_FROM_BYTES,
}
_DEVICES = "cuda_ipc"
_REMOTE = "rdma"


def check_pair(pair: PairFacts) -> Iterator[Finding]:
    """Yields the rates of a pair, and why it does not use a better channel."""
    where = f"{pair.caller} -> {pair.callee}"
    if pair.error:
        fix = "open the ports of workers in the firewall; WEFT_LISTEN sets the address"
        yield Finding(Level.ERROR, "pair", where, f"cannot be called: {pair.error}", fix)
        return
    obstacles = dict(pair.obstacles)
    used = [f"{name} from {_size(_from(name))}" for name in _STARTS if not obstacles.get(name)]
    if obstacles.get(_DEVICES) == "":
        used.append(f"{_DEVICES} between GPUs")
    if obstacles.get(_REMOTE) == "":
        used.append(f"{_REMOTE} from {_size(knobs.RDMA_FROM_BYTES.get())}")
    text = (
        f"{pair.latency_s * 1e6:.0f} us a call, {pair.bytes_per_s / 1e9:.1f} GB/s of a tensor "
        f"({_limit(pair)}); "
        f"channels: {', '.join(['inline', *used])}"
    )
    yield Finding(Level.GOOD, "pair", where, text)
    if not pair.is_one_host:
        reason = obstacles.get(_REMOTE, "")
        if reason and NO_DEVICE not in reason:
            yield Finding(Level.NOTE, "channel", where, f"no {_REMOTE}: {reason}", "")
        return
    for name in ("shm", "cma", _DEVICES):
        reason = obstacles.get(name, "")
        if reason and NO_CUDA not in reason:
            yield Finding(Level.NOTE, "channel", where, f"no {name}: {reason}", _fix(name, reason))


def _limit(pair: PairFacts) -> str:
    """Returns what limits the rate of a pair: memory, or the network between its hosts."""
    if pair.is_one_network:
        return f"{pair.memory_bytes_per_s / 1e9:.1f} GB/s is a copy in memory"
    interface, speed = pair.link
    if speed:
        return f"{speed / 1e9:.3g} GB/s is the speed of {interface}"
    return f"{interface or 'the network between'} does not tell its speed"


def _fix(name: str, reason: str) -> str:
    """Returns the command against an obstacle, where one is known."""
    if "ptrace" in reason:
        return "sysctl kernel.yama.ptrace_scope=0, or in a container --cap-add=SYS_PTRACE"
    if "namespace" in reason:
        return "start both containers with --pid=host or --pid=container:NAME"
    if "runs as user" in reason:
        return "start both workers as the same user"
    if name == _DEVICES and knobs.CUDA_IPC.variable in reason:
        return f"unset {knobs.CUDA_IPC.variable}"
    return "unset WEFT_SHM_LIMIT_BYTES" if name == "shm" and "no shared memory" in reason else ""


def _from(name: str) -> int:
    return int(_STARTS[name].get())


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
