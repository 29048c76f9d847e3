"""Reads the reports that the workers of a group have written into a folder."""

from __future__ import annotations

import os

from torchweft.errors import ConfigurationError, GroupNotFound, ProtocolError
from torchweft.observe.group import Answers
from torchweft.protocol.observing.report import FILE_SUFFIX, decode_report

_LONG_S = 60.0
_NO_FILE = (
    "has written no file here: it is stopped, or has ended, or code in C keeps its interpreter "
    "busy, or its host has another folder"
)


def read_folder(folder: str) -> Answers:
    """Returns the reports in a folder; workers that they name and that wrote none are silent.

    Raises:
        ConfigurationError: The folder cannot be read.
        GroupNotFound: It has no report, or those of several groups.
        ProtocolError: A file is no report.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(FILE_SUFFIX))
    except OSError as error:
        raise ConfigurationError(f"cannot read the folder {folder!r}: {error.strerror}") from None
    answers = Answers()
    for name in names:
        path = os.path.join(folder, name)
        with open(path, "rb") as file:
            try:
                answers.reports.append(decode_report(file.read()))
            except ProtocolError as error:
                raise ProtocolError(f"{path!r}: {error}") from error
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
    members = {member.name for report in answers.reports for member in report.identity.members}
    there = {report.worker for report in answers.reports}
    answers.silent = dict.fromkeys(sorted(members - there), _NO_FILE)
    return answers


def age_note(answers: Answers) -> str:
    """Returns a warning if the reports are from far apart moments; else an empty text."""
    times = [report.time for report in answers.reports]
    apart_s = max(times) - min(times)
    if apart_s < _LONG_S:
        return ""
    return f"the reports are {apart_s:.0f} s apart; the oldest may be of another problem"
