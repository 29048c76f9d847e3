"""Reads the reports that the workers of a group have written into a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from torchweft.columns import printable
from torchweft.errors import ConfigurationError, GroupNotFound, ProtocolError
from torchweft.files import read_plain
from torchweft.observe.group import Answers
from torchweft.observe.report import FILE_SUFFIX, Member, Report, decode_report
from torchweft.observe.session import is_stopped, process_at, told_of

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
            answers.reports.append(decode_report(read_plain(path, _LIMIT_BYTES)))
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
            answers.silent[name] = _why_no_file(member)
        elif latest - report.time > _APART_S and (pid := _stopped_process(member)) is not None:
            answers.silent[name] = _why_old(report, pid, latest)
            answers.reports.remove(report)
    left_out = [f"left out, as it cannot be read: {why}" for why in broken.values()]
    return answers, [*left_out, *_age_note(answers)]


def _why_no_file(member: Member) -> str:
    pid = _stopped_process(member)
    return _NO_FILE if pid is None else f"has written no file here: {told_of(pid)}"


def _stopped_process(member: Member) -> int | None:
    """Returns the process of a worker of this host that is stopped now."""
    pid = next(filter(None, map(process_at, member.addresses)), None)
    return pid if pid is not None and is_stopped(pid) else None


def _why_old(report: Report, pid: int, latest: float) -> str:
    written = _time_of_day(report.time)
    places = "".join(f"\n    {place}" for place in _places(report))
    told = f", when it was at{places}" if places else ""
    return (
        f"has written no file since {written}: {told_of(pid)}. Its last file is "
        f"{latest - report.time:.0f} s older than that of another worker{told}"
    )


def _time_of_day(seconds: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "a time that no clock shows"


def _places(report: Report) -> Iterable[str]:
    """Returns the lines of the program at which a worker was."""
    return (each.place for each in report.threads if each.place and not each.is_idle)


def _age_note(answers: Answers) -> list[str]:
    """Returns a warning if the reports are from far apart moments."""
    times = [report.time for report in answers.reports]
    apart_s = max(times) - min(times)
    if apart_s < _LONG_S:
        return []
    return [f"the reports are {apart_s:.0f} s apart; the oldest may be of another problem"]
