"""Finds the workers of a group from outside, and asks all of them at a time.

Also reads the reports that the workers of a group have written into a folder.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torchweft import knobs
from torchweft.columns import printable
from torchweft.errors import (
    ConfigurationError,
    GroupNotFound,
    ObserveError,
    ObserverRefused,
    ProtocolError,
)
from torchweft.files import read_plain
from torchweft.observe.session import Access, is_stopped, told_of, why_silent
from torchweft.reports import (
    FACTS,
    FILE_SUFFIX,
    MEASURE,
    REPORT,
    WHO,
    Identity,
    Member,
    PairFacts,
    Report,
    WorkerFacts,
    ask,
    decode,
    listeners_here,
    may_reach,
    process_at,
)

T = TypeVar("T")
R = TypeVar("R")

_FIND_S = 2.0
"""Time for the workers of this host to say who they are."""
_AT_A_TIME = 32
_LOST = "lost"


@dataclass
class Answers:
    """What the workers of a group have answered.

    Attributes:
        reports: The reports.
        silent: Why there is no report of each other worker, as the end of a sentence.
        lost: Of these, the workers that are lost for the others.
    """

    reports: list[Report] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)


class Group:
    """The workers of one group.

    Args:
        identities: Some of its workers, at least one; they name the others.
        access: By what an observer proves itself.
    """

    def __init__(self, identities: Iterable[Identity], access: Access) -> None:
        found = list(identities)
        self.name = found[0].group
        self.program = found[0].program
        self._access = access
        self._members: dict[str, Member] = {}
        self._learn(found)

    def _learn(self, identities: Iterable[Identity]) -> None:
        """Takes up the members that workers know now; of two lives of a name, the later one."""
        members: dict[str, Member] = {}
        for member in [each for identity in identities for each in identity.members]:
            known = members.get(member.name)
            if known is None or _lateness(member) > _lateness(known):
                members[member.name] = member
        if members:
            self._members = dict(sorted(members.items(), key=lambda item: item[1].rank))

    @property
    def members(self) -> list[Member]:
        """Its workers, by rank."""
        return list(self._members.values())

    @property
    def workers(self) -> list[str]:
        """The names of its workers, by rank."""
        return list(self._members)

    def ask(self, timeout_s: float, question: str = REPORT) -> Answers:
        """Asks all workers at a time; waits ``timeout_s`` at most for each.

        Args:
            timeout_s: Seconds.
            question: ``REPORT``, ``DETAIL`` or ``METRICS``.
        """
        answers = Answers()
        answers.reports = self._ask_all(question, Report, timeout_s, answers)
        self._learn([report.identity for report in answers.reports])
        return answers

    def facts(self, timeout_s: float) -> tuple[list[WorkerFacts], Answers]:
        """Asks all workers for their facts, at a time; the answers name the silent workers."""
        silent = Answers()
        return self._ask_all(FACTS, WorkerFacts, timeout_s, silent), silent

    def measure(self, caller: str, callee: str, timeout_s: float) -> PairFacts:
        """Has one worker measure its way to another; waits ``timeout_s`` at most."""
        question = MEASURE + callee
        found = _try(
            lambda: decode(PairFacts, self._ask(self._members[caller], question, timeout_s))
        )
        return found if isinstance(found, PairFacts) else PairFacts(caller, callee, str(found))

    def _ask_all(
        self, question: str, wanted: type[T], timeout_s: float, answers: Answers
    ) -> list[T]:
        """Asks all workers at a time; returns what they say, and notes the silent ones."""
        members = list(self._members.values())

        def answer_of(member: Member) -> T | Exception:
            return _try(lambda: decode(wanted, self._ask(member, question, timeout_s)))

        found: list[T] = []
        for member, answer in zip(members, _each(answer_of, members), strict=True):
            if not isinstance(answer, Exception):
                found.append(answer)
            elif member.state == _LOST:
                answers.silent[member.name] = f"is lost: {member.cause}"
                answers.lost.add(member.name)
            else:
                pid = next(filter(None, map(process_at, member.addresses)), None)
                answers.silent[member.name] = why_silent(answer, pid, timeout_s)
        return found

    def _ask(self, member: Member, question: str, timeout_s: float) -> bytes:
        """Asks a worker at the first of its addresses that can be reached from here."""
        failure: Exception = ConnectionError("it has no address that can be reached from here")
        is_here = member.host in ("", socket.gethostname())
        for address in member.addresses:
            if may_reach(address, is_here=is_here):
                try:
                    return ask(address, question, *self._access, timeout_s)
                except ConnectionError as error:
                    failure = error
        raise failure


def _lateness(member: Member) -> tuple[int, bool]:
    """Orders what workers say of one name: a later life counts, and that a life is lost."""
    return member.id, member.state == _LOST


def find(target: str, access: Access) -> Group:
    """Finds a group that runs on this host, or one of whose workers listens at an address.

    Args:
        target: The name of the group or its beginning, the process id or the name of one of its
            workers, or the address of one, as ``tcp:HOST:PORT``. Empty for the only one.
        access: By what this observer proves itself.

    Raises:
        GroupNotFound: There is none, or several could be meant.
        ObserverRefused: The workers have another secret.
        ObserveError: The worker at the address cannot be asked.
        ConfigurationError: An address is malformed.
    """
    if ":" in target and target.partition(":")[0] in ("tcp", "tls", "unix"):
        return Group([_at_address(target, access)], access)
    found, refusing, silent = _on_this_host(access)
    groups: dict[str, list[Identity]] = {}
    for identity in found:
        groups.setdefault(identity.group, []).append(identity)
    meant = {name: each for name, each in groups.items() if _is_meant(target, name, each)}
    if len(meant) == 1:
        return Group(next(iter(meant.values())), access)
    if meant:
        raise GroupNotFound(
            f"{len(meant)} groups {'could be meant' if target else 'run here'}; name one: "
            f"{_listed(meant)}"
        )
    # Where several programs run, those that cannot be asked may be others.
    asked = f"there is no group {target!r} on this host" if target else "no group runs on this host"
    but = f"{asked} that can be asked; " if target else ""
    if refusing and not groups:
        raise _refused(access, but)
    if silent and not groups:
        is_one = len(silent) == 1
        subject = "a worker" if is_one else f"{len(silent)} workers"
        raise ObserveError(
            f"{but}{subject} on this host {'does' if is_one else 'do'} not answer: "
            + "; ".join(f"{'it' if is_one else 'one'} {why}" for why in silent)
        )
    others = f"; there are: {_listed(groups)}" if groups else _none_here()
    if refusing:
        others += f"; workers here that refuse this observer: {refusing}; {_secret_advice(access)}"
    raise GroupNotFound(f"{asked}{others}")


def look_around(access: Access) -> tuple[int, list[str]]:
    """Asks the workers of this host and network namespace who they are.

    Takes a few seconds at most.

    Returns:
        How many answer, those with another secret included; and for each that listens but does not
        answer, why, as the end of a sentence.
    """
    found, refusing, silent = _on_this_host(access)
    return len(found) + refusing, silent


def _at_address(address: str, access: Access) -> Identity:
    timeout_s = knobs.CONNECT_TIMEOUT_S.get()
    try:
        return decode(Identity, ask(address, WHO, *access, timeout_s))
    except ObserverRefused as error:
        raise _refused(access) from error
    except (OSError, ProtocolError) as error:
        if isinstance(error, TimeoutError) and access.tls is None:
            advice = "if its group has TLS, set WEFT_TLS_CERT, WEFT_TLS_KEY and WEFT_TLS_CA"
        else:
            advice = (
                "a group names the addresses of its workers in 'torchweft top --json' on its host"
            )
        raise ObserveError(f"the worker at {address} cannot be asked: {error}; {advice}") from error


def _on_this_host(access: Access) -> tuple[list[Identity], int, list[str]]:
    """Asks the workers of this host who they are.

    Returns:
        Those that answer, how many refuse, and why others do not answer, as ends of sentences.
    """
    places = listeners_here()

    def identity_of(address: str) -> Identity | Exception:
        return _try(lambda: decode(Identity, ask(address, WHO, *access, _FIND_S)))

    found: list[Identity] = []
    refusing = 0
    silent: list[str] = []
    for address, answer in zip(places, _each(identity_of, places), strict=True):
        if isinstance(answer, Identity):
            found.append(answer)
        elif isinstance(answer, ObserverRefused):
            refusing += 1
        elif isinstance(answer, TimeoutError):
            silent.append(why_silent(answer, process_at(address), _FIND_S))
    return found, refusing, silent


def _is_meant(target: str, group: str, identities: Iterable[Identity]) -> bool:
    found = list(identities)
    if not target or group.startswith(target) or target in [str(each.pid) for each in found]:
        return True
    members = [member for identity in found for member in identity.members]
    if target in [each.worker for each in found] or target in [each.name for each in members]:
        return True
    # A worker that does not answer; only the kernel can tell its process id.
    listening = dict.fromkeys(address for member in members for address in member.addresses)
    return target.isdecimal() and target in map(str, map(process_at, listening))


def _refused(access: Access, but: str = "") -> ObserverRefused:
    if access.secret is None:
        reason = "the workers here have a secret, and this observer has none"
    else:
        reason = "the workers here do not take the secret of this observer"
    return ObserverRefused(f"{but}{reason}: {_secret_advice(access)}")


def _secret_advice(access: Access) -> str:
    advice = f"set {knobs.SECRET_FILE.variable} to the file that the workers have"
    if access.secret is None:
        return f"{advice} (or they run an older Weft, which cannot be observed)"
    return f"{advice}, or unset it if they have none"


def _none_here() -> str:
    return (
        f" as user {os.geteuid()}, in this network namespace; start it first, or run this command "
        "on a host and in the container of one of its workers, or name the address of one as "
        "tcp:HOST:PORT"
    )


def _listed(groups: Mapping[str, list[Identity]]) -> str:
    return "; ".join(
        f"{name} with {', '.join(member.name for member in found[0].members)}"
        f" ({found[0].program or 'no program'})"
        for name, found in sorted(groups.items())
    )


def _try(work: Callable[[], T]) -> T | Exception:
    try:
        return work()
    except (OSError, ProtocolError, ConfigurationError, ObserverRefused) as error:
        return error


def _each(work: Callable[[T], R], parts: list[T]) -> list[R]:
    if not parts:
        return []
    with ThreadPoolExecutor(min(len(parts), _AT_A_TIME), "weft-observer") as pool:
        return list(pool.map(work, parts))


# Reports in files

_LIMIT_BYTES = 256 << 20
_LONG_S = 60.0
_APART_S = 1.0
"""Reports of one moment are not further apart."""
_NO_FILE = (
    "has written no file here: it is stopped, or has ended, or code in C keeps its interpreter "
    "busy, or its host has another folder"
)


def read_folder(folder: str) -> tuple[Answers, list[str]]:
    """Returns the reports in a folder, and warnings about them.

    Workers that the reports name and that wrote none, or none that can be read, are silent. So are
    those that are stopped on this host, and whose report is older than that of another.

    Raises:
        ConfigurationError: The folder cannot be read.
        GroupNotFound: It has no report that can be read, or those of several groups.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(FILE_SUFFIX))
    except OSError as error:
        raise ConfigurationError(f"cannot read the folder {folder!r}: {error.strerror}") from None
    answers = Answers()
    broken: dict[str, str] = {}
    for name in names:
        path = os.path.join(folder, name)
        try:
            answers.reports.append(decode(Report, read_plain(path, _LIMIT_BYTES)))
        except (OSError, ProtocolError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            broken[printable(name.removesuffix(FILE_SUFFIX))] = f"{path!r}: {reason}"
    if broken and not answers.reports:
        raise GroupNotFound(f"no report can be read: {'; '.join(broken.values())}")
    if not answers.reports:
        raise GroupNotFound(
            f"the folder {folder!r} has no report of a worker (*{FILE_SUFFIX}): a worker writes "
            "one on SIGQUIT, or after a wait of WEFT_DUMP_AFTER_S seconds, and names the folder in "
            "its log"
        )
    groups = sorted({report.identity.group for report in answers.reports})
    if len(groups) > 1:
        raise GroupNotFound(
            f"the folder {folder!r} has reports of several groups ({', '.join(groups)}); move "
            "those of one group into a folder of its own"
        )
    members = {each.name: each for report in answers.reports for each in report.identity.members}
    there = {report.worker: report for report in answers.reports}
    latest = max(report.time for report in answers.reports)
    for name, member in sorted(members.items()):
        report = there.get(name)
        if report is None and name in broken:
            answers.silent[name] = f"has written a file that cannot be read, {broken[name]}"
        elif report is None:
            pid = _stopped_process(member)
            why = _NO_FILE if pid is None else f"has written no file here: {told_of(pid)}"
            answers.silent[name] = why
        elif latest - report.time > _APART_S and (pid := _stopped_process(member)) is not None:
            answers.silent[name] = _why_old(report, pid, latest)
            answers.reports.remove(report)
    left_out = [f"left out, as it cannot be read: {why}" for why in broken.values()]
    return answers, [*left_out, *_age_note(answers)]


def _stopped_process(member: Member) -> int | None:
    """Returns the process of a worker of this host that is stopped now."""
    pid = next(filter(None, map(process_at, member.addresses)), None)
    return pid if pid is not None and is_stopped(pid) else None


def _why_old(report: Report, pid: int, latest: float) -> str:
    places = [each.place for each in report.threads if each.place and not each.is_idle]
    told = "".join(f"\n    {place}" for place in places)
    return f"has written no file for {latest - report.time:.0f} s: {told_of(pid)}" + (
        f"; before, it was at{told}" if told else ""
    )


def _age_note(answers: Answers) -> list[str]:
    """Returns a warning if the reports are from far apart moments."""
    times = [report.time for report in answers.reports]
    apart_s = max(times) - min(times)
    if apart_s < _LONG_S:
        return []
    return [f"the reports are {apart_s:.0f} s apart; the oldest may be of another problem"]
