"""What ``torchweft doctor`` looks at: facts of each worker, and the checks of them.

Facts are gathered, by a worker of the group or from outside. Checks are pure functions of facts,
and return findings. From outside, some workers measure their ways to others: one way at a time, as
two would disturb each other, and briefly, since the group is at work.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchweft import knobs
from torchweft.errors import ConfigurationError
from torchweft.hybrid import Facts, choose_backend
from torchweft.observe.examining import THOROUGH, gather, tell_host, tell_pair
from torchweft.observe.group import Group
from torchweft.observe.text import Table, plain
from torchweft.reports import HostFacts, PairFacts, WorkerFacts, decode
from torchweft.rpc import get_worker_infos, rpc_sync

__all__ = [
    "Diagnosis",
    "Finding",
    "HostFacts",
    "Level",
    "PairFacts",
    "examine",
    "examine_group",
    "gather",
]


class Level(enum.Enum):
    """How bad a finding is: only errors make the diagnosis fail."""

    GOOD = "ok"
    NOTE = "note"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        level: How bad it is.
        check: Name of the check.
        where: The host, the worker or the pair of workers.
        text: What was found.
        fix: What changes it; empty if nothing is to be done.
    """

    level: Level
    check: str
    where: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings.

    Attributes:
        findings: In the order of the checks.
    """

    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Whether there is no error."""
        return all(each.level is not Level.ERROR for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Returns the findings for ``json.dumps``."""
        lines = [{**asdict(each), "level": each.level.value} for each in self.findings]
        return {"is_well": self.is_well, "findings": lines}

    def parts(self) -> list[Table | str]:
        """Returns a table with a row for each finding and each fix, and the sum, to be printed."""
        rows = []
        for each in self.findings:
            rows.append([each.level.value, each.check, f"{each.where}: {each.text}"])
            if each.fix:
                rows.append(["", "", f"-> {each.fix}"])
        errors = sum(each.level is Level.ERROR for each in self.findings)
        notes = sum(each.level is Level.NOTE for each in self.findings)
        told = "all is well" if self.is_well else _counted(errors, "error")
        return [Table("", (), rows, 3), f"{told}, {_counted(notes, 'note')}" if notes else told]

    def __str__(self) -> str:
        """Returns a line for each finding, and one for each fix."""
        return plain(self.parts())


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' if count > 1 else ''}"


LEAST_DESCRIPTORS = 1024
LEAST_SHM_BYTES = 1 << 30
MOST_CLOCK_S = 1.0
_MEBIBYTE = 1 << 20
_SHARED, _DEVICES, _REMOTE = "shm", "cuda_ipc", "rdma"


def diagnose(facts: Sequence[HostFacts], pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    """Yields the findings of all checks; pure."""
    if facts:
        yield from check_versions(facts)
        yield from check_twins(facts)
        yield from check_mtu(facts)
        yield from check_backend(facts)
    told = [each for one in facts for each in check_host(one, len(facts))]
    yield from dict.fromkeys(told)  # What several workers say of their host is told once.
    yield from check_clocks(pairs)
    for pair in pairs:
        yield from check_pair(pair)


def check_versions(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yields a finding for each of Weft, PyTorch and Python."""
    for name, label in (("weft", "Weft"), ("torch", "torch"), ("python", "Python")):
        versions: dict[str, list[str]] = {}
        for each in facts:
            versions.setdefault(_compared(name, getattr(each, name)), []).append(each.worker)
        if len(versions) == 1:
            text = f"{label} {getattr(facts[0], name)}"
            yield Finding(Level.GOOD, "versions", "all workers", text)
            continue
        told = "; ".join(f"{each} on {', '.join(on)}" for each, on in versions.items())
        fix = f"install the same {label} everywhere"
        yield Finding(Level.ERROR, "versions", "workers", f"different {label}: {told}", fix)


def _compared(name: str, version: str) -> str:
    """Returns the part of a version that must be equal: of Python and torch, without the patch."""
    return version if name == "weft" else ".".join(version.split(".")[:2])


def check_twins(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yields which workers run the hot path in C, and why others do not."""
    native = [each.worker for each in facts if not each.plain_because]
    if native:
        where = "all workers" if len(native) == len(facts) else ", ".join(native)
        yield Finding(Level.GOOD, "twin", where, "native: values and small tensors in C")
    for each in facts:
        if each.plain_because:
            text = f"plain, so small calls take longer: {each.plain_because}"
            yield Finding(Level.NOTE, "twin", each.worker, text, _twin_fix(each.plain_because))


def _twin_fix(reason: str) -> str:
    """Returns what brings the native twin, where that is known."""
    if "compiler" in reason:
        return "install gcc and the headers of Python, then torchweft again"
    if "DLPack" in reason:
        return "pip install 'torch>=2.10'"
    return "unset WEFT_NATIVE" if "WEFT_NATIVE" in reason else ""


def check_backend(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yields what ``backend="auto"`` would take."""
    try:
        choice = choose_backend([_devices(each) for each in facts])
    except ConfigurationError as error:
        yield Finding(Level.NOTE, "collectives", "all workers", str(error))
        return
    yield Finding(Level.GOOD, "collectives", "all workers", str(choice))


def _devices(facts: HostFacts) -> Facts:
    return Facts(
        facts.host,
        facts.device,
        facts.backends,
        facts.has_infiniband,
        facts.has_ip_over_infiniband,
    )


def check_host(facts: HostFacts, workers: int) -> Iterator[Finding]:
    """Yields what is wrong with one worker and its host."""
    # Several files for each other worker.
    needed = max(LEAST_DESCRIPTORS, 64 + 8 * workers)
    if 0 <= facts.descriptors < needed:
        text = f"may have {facts.descriptors} descriptors open, and needs {needed}"
        yield Finding(Level.ERROR, "descriptors", facts.worker, text, f"ulimit -n {needed}")
    if facts.shm_bytes < LEAST_SHM_BYTES:
        text = (
            f"/dev/shm has {facts.shm_bytes // _MEBIBYTE} MiB: data loaders and "
            "torch.multiprocessing keep tensors there (Weft does not)"
        )
        fix = "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm"
        yield Finding(Level.ERROR, "/dev/shm", facts.host, text, fix)
    if facts.ptrace_scope > 0:
        text = (
            f"ptrace_scope is {facts.ptrace_scope}: workers that are not parent and child may not "
            "read one another's memory, so tensors that find no room in shared memory go through "
            "sockets"
        )
        fix = "sysctl kernel.yama.ptrace_scope=0"
        yield Finding(Level.NOTE, "ptrace", facts.host, text, fix)
    if facts.is_resolved and not facts.addresses:
        text = "its own name does not resolve, and gloo asks for it"
        fix = f"add {facts.host} to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface"
        yield Finding(Level.NOTE, "names", facts.host, text, fix)


def check_mtu(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yields whether interfaces of one name have the same size of packets on all hosts."""
    found: dict[str, dict[int, str]] = {}
    for each in facts:
        for interface, size in each.mtu:
            found.setdefault(interface, {}).setdefault(size, each.host)
    for interface, sizes in found.items():
        if len(sizes) > 1:
            told = ", ".join(f"{size} on {host}" for size, host in sizes.items())
            fix = f"ip link set {interface} mtu {min(sizes)}, on all hosts"
            yield Finding(Level.ERROR, "mtu", interface, f"packets differ: {told}", fix)


def check_clocks(pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    """Yields which clocks differ too much, and else by how much those of all hosts do."""
    for each in pairs:
        if not each.error and abs(each.clock_s) > MOST_CLOCK_S:
            text = f"the clock of {each.callee} is {each.clock_s:+.1f} s off that of {each.caller}"
            fix = "run an NTP client on both hosts"
            yield Finding(Level.ERROR, "clock", each.callee, text, fix)
    between = [each for each in pairs if each.latency_s and not each.is_one_host]
    worst = max(between, key=lambda each: abs(each.clock_s), default=None)
    if worst is not None and abs(worst.clock_s) <= MOST_CLOCK_S:
        text = (
            f"clocks differ by {abs(worst.clock_s) * 1e3:.1f} ms at most, as those of "
            f"{worst.caller} and {worst.callee}, measured to {worst.clock_error_s * 1e3:.1f} ms"
        )
        yield Finding(Level.GOOD, "clock", "all hosts", text)


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
        if reason := obstacles.get(name):
            yield Finding(Level.NOTE, "channel", where, f"no {name}: {reason}", _fix(name, reason))


def _channels(pair: PairFacts) -> str:
    """Returns from which size on a tensor takes which channel, and where it goes without room."""
    starts = sorted({max(pair.inline_bytes, each) for each in (0, *dict(pair.channels).values())})
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


_TIMEOUT_S = THOROUGH.timeout_s


def examine(timeout: float = _TIMEOUT_S) -> Diagnosis:
    """Examines the group of this worker: each host, and each pair of workers. Blocks.

    Takes about 0.2 s for each pair, one after the other: the pairs would disturb one another.

    Args:
        timeout: Seconds for each worker, and each pair.
    """
    names = [each.name for each in get_worker_infos()]
    facts: list[HostFacts] = []
    failed: list[Finding] = []
    for name in names:
        try:
            facts.append(decode(HostFacts, rpc_sync(name, tell_host, timeout=timeout)))
        except Exception as error:
            text = f"does not answer: {type(error).__name__}: {error}"
            failed.append(Finding(Level.ERROR, "worker", name, text))
    answering = [each.worker for each in facts]
    pairs = [
        _measured(one, other, timeout) for one in answering for other in answering if one != other
    ]
    return Diagnosis((*failed, *diagnose(facts, pairs)))


def _measured(caller: str, callee: str, timeout: float) -> PairFacts:
    try:
        answer = rpc_sync(caller, tell_pair, (callee, timeout), timeout=timeout)
        return decode(PairFacts, answer)
    except Exception as error:
        return PairFacts(caller, callee, f"{type(error).__name__}: {error}")


_MEASURING_S = 5.0
_LISTED = 3


def examine_group(group: Group, timeout_s: float = 2.0, most_pairs: int = 32) -> Diagnosis:
    """Examines a group from outside; some milliseconds of two workers for each measured pair.

    Pairs without a connection are not measured, since that would make one. Blocks.

    Args:
        group: The group.
        timeout_s: How long to wait for the facts of each worker.
        most_pairs: How many pairs to measure, at most, spread over all workers.
    """
    facts, answers = group.facts(timeout_s)
    fix = "examine with the version of Weft that the workers have, if torchweft top reaches them"
    failed = [
        Finding(Level.ERROR, "worker", name, why, fix if "the greeting" in why else "")
        for name, why in answers.silent.items()
    ]
    known = [pair for each in facts for pair in each.pairs]
    pairs, count = _measured_in(group, known, set(answers.silent), most_pairs)
    found = merged(diagnose([each.host for each in facts], pairs))
    return Diagnosis((*failed, *found, *_coverage(facts, len(known), count, most_pairs)))


def _measured_in(
    group: Group, known: Sequence[PairFacts], silent: set[str], most: int
) -> tuple[list[PairFacts], int]:
    """Measures some pairs in place of what is known of them; returns all, and how many."""
    rank = {name: number for number, name in enumerate(group.workers)}
    able = [each for each in known if not each.error and each.callee not in silent]
    chosen = {each.where for each in sample(able, rank, most)}
    pairs, busy, count = [], set[str](), 0
    for each in known:
        if each.where in chosen and each.callee not in busy:
            each = group.measure(each.caller, each.callee, _MEASURING_S)
            count += not each.error
            if each.is_busy:  # Its other pairs would wait as long.
                busy.add(each.callee)
        pairs.append(each)
    return pairs, count


def sample(pairs: Sequence[PairFacts], rank: dict[str, int], most: int) -> list[PairFacts]:
    """Returns some of the pairs: each worker's turn comes as often, to near and to far ranks."""
    half = (len(rank) + 1) // 2

    def turn(pair: PairFacts) -> tuple[int, int]:
        caller = rank.get(pair.caller, 0)
        distance = (rank.get(pair.callee, 0) - caller) % max(len(rank), 1)
        return (2 * distance if distance < half else 2 * (distance - half) + 1), caller

    every = max(len(rank) // max(most, 1), 1)
    return sorted(pairs, key=turn)[::every][:most]


def merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yields the findings, and those of channels that differ in nothing but the pair as one."""
    same: dict[object, list[Finding]] = {}
    for number, each in enumerate(findings):
        is_alike = each.check == "channel"
        same.setdefault((each.level, each.text, each.fix) if is_alike else number, []).append(each)
    for group in same.values():
        where = ", ".join(each.where for each in group[:_LISTED])
        if len(group) > _LISTED:
            where += f" and {len(group) - _LISTED} more pairs"
        first = group[0]
        yield Finding(first.level, first.check, where, first.text, first.fix)


def _coverage(
    facts: Sequence[WorkerFacts], known: int, measured: int, most: int
) -> Iterator[Finding]:
    """Yields how many of the pairs have been measured, if not all."""
    pairs = len(facts) * (len(facts) - 1)
    if measured == pairs:
        return
    text = f"{measured} of {pairs} pairs are measured"
    if known < pairs:
        text += (
            f"; {pairs - known} have no connection, as neither has called the other, so they have "
            "chosen no channels yet"
        )
    fix = f"torchweft doctor --group --pairs {known} measures all" if most < known else ""
    yield Finding(Level.GOOD, "pairs", "all workers", text, fix)
