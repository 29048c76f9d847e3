"""Puts the state of long work into words: rows for a terminal, lines for a log, and a summary."""

from __future__ import annotations

from typing import NamedTuple

from torchweft.columns import printable
from torchweft.progress.work import Job, Loss, Straggler, Work, WorkerShare

MOST_LISTED = 8
"""How many workers, or parts, are listed by name or number; more are only counted."""
MOST_JOBS = 3
MOST_WARNINGS = 8
"""How many lines about losses and stragglers are shown at once; more are only counted."""


class Nouns(NamedTuple):
    """An application's words for a job and for a part of it, in the singular."""

    job: str = "job"
    part: str = "part"


class Row(NamedTuple):
    """A bar on a terminal, and the texts around it.

    Attributes:
        title: What is counted.
        steps: How far it is.
        total: How far it goes; None if that is unknown.
        done: The count in words.
        note: What else is known.
    """

    title: str
    steps: int
    total: int | None
    done: str
    note: str


def rows_of(label: str, nouns: Nouns, work: Work) -> list[Row]:
    """Returns the row of the program's steps, or else of all jobs, and those of running jobs."""
    if work.steps or work.total:
        total = "" if work.total is None else f"/{work.total}"
        figures = "  ".join(f"{name} {figure}" for name, figure in work.figures.items())
        rows = [Row(label or "step", work.steps, work.total, f"{work.steps}{total}", figures)]
    else:
        done = f"{counted(work.parts_ended, nouns.part)} done"
        title = f"{nouns.job} {work.jobs_begun}"
        rows = [Row(f"{label}: {title}" if label else title, work.parts_ended, None, done, "")]
    more = len(work.jobs) - MOST_JOBS
    for job in work.jobs[:MOST_JOBS]:
        title = f"{plural(nouns.part)} of {short(job.name)}"
        done = f"{len(job.ended)}/{job.parts}"
        rows.append(Row(title, len(job.ended), job.parts, done, _running(job)))
    if more > 0:
        rows[-1] = rows[-1]._replace(note=f"and {counted(more, nouns.job)} more")
    return [each._replace(title=printable(each.title), note=printable(each.note)) for each in rows]


def log_line(label: str, nouns: Nouns, work: Work) -> str:
    """Returns one line for a log with the progress of the steps and the jobs."""
    first, *jobs = rows_of(label, nouns, work)
    gap = " " if work.steps or work.total else "  "
    parts = [f"{first.title}{gap}{first.done}"]
    parts += [pace(work.per_s, work.left_s), first.note]
    parts += [f"{job.title} {job.done}" for job in jobs]
    return "  ".join(filter(None, parts))


def pace(per_s: float | None, left_s: float | None) -> str:
    """Returns the rate of steps, and the remaining time, as far as they are known."""
    told = []
    if per_s:
        told.append(f"{per_s:.1f} steps/s" if per_s >= 1 else f"{1 / per_s:.1f} s a step")
    if left_s is not None:
        told.append(f"{clock(left_s)} left")
    return "  ".join(told)


def warnings_of(found: list[Loss | Straggler], nouns: Nouns) -> list[str]:
    """Returns lines about losses and about parts that are behind."""
    lines = [
        _lost(each, nouns) if isinstance(each, Loss) else _behind(each, nouns)
        for each in found[:MOST_WARNINGS]
    ]
    if len(found) > MOST_WARNINGS:
        lines.append(f"and {len(found) - MOST_WARNINGS} more are lost or behind")
    return [printable(line) for line in lines]


def summary(
    label: str, nouns: Nouns, work: Work, seconds: float, error: type[BaseException] | None
) -> str:
    """Returns the final line, which tells how much was done, and by which workers."""
    stopped = "" if error is None else f" stopped by {error.__name__}"
    facts = [f"{_work_done(work, nouns)} in {duration(seconds)}", *_shares(work.workers, nouns)]
    others = [(work.moves, "moved"), (work.reruns, "rerun")]
    facts += [f"{count} {what}" for count, what in others if count]
    if work.jobs_failed:
        facts.append(f"{counted(work.jobs_failed, nouns.job)} failed")
    return printable(f"{label or plural(nouns.job)}{stopped}: {'; '.join(facts)}")


def duration(seconds: float) -> str:
    """Writes a time as ``3.2 s``, ``4:05`` or ``1:04:05``."""
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def clock(seconds: float) -> str:
    """Writes a time as ``0:03``, ``4:05`` or ``1:04:05``."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def counted(count: int, noun: str) -> str:
    """Writes ``1 part`` or ``2,000 parts``."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Returns the plural of a regular noun, also of ``batch``."""
    return noun + ("es" if noun.endswith(("ch", "sh", "s", "x")) else "s")


def short(name: str) -> str:
    """Returns the last part of a function's name, without the suffix that ``parallelize`` adds."""
    return name.rpartition(".")[2].partition("__parallelize_")[0]


def _running(job: Job) -> str:
    """Returns how many parts run on each worker; with too many workers, only how many are busy."""
    running = job.running_on()
    if len(running) > MOST_LISTED:
        busy = sum(1 for count in running.values() if count)
        return f"running: {sum(running.values())} on {busy} of {len(running)} workers"
    told = [
        f"{worker} {'lost' if worker in job.lost else count}" for worker, count in running.items()
    ]
    return f"running: {'  '.join(told)}" if told else ""


def _behind(straggler: Straggler, nouns: Nouns) -> str:
    return (
        f"{straggler.worker} is behind: {nouns.part} {straggler.part} of {short(straggler.name)} "
        f"for {straggler.seconds:.1f} s (median {straggler.median_s:.1f} s)"
    )


def _lost(loss: Loss, nouns: Nouns) -> str:
    if not loss.parts:
        return f"{loss.worker} was lost"
    if len(loss.parts) == 1:
        return f"{loss.worker} was lost; {nouns.part} {loss.parts[0]} runs again on another"
    numbers = ", ".join(str(part) for part in loss.parts[:MOST_LISTED])
    more = len(loss.parts) - MOST_LISTED
    rest = f" and {more} more" if more > 0 else ""
    return f"{loss.worker} was lost; {plural(nouns.part)} {numbers}{rest} run again on others"


def _work_done(work: Work, nouns: Nouns) -> str:
    parts = counted(work.parts_ended, nouns.part)
    if not work.steps and not work.total:
        return f"{counted(work.jobs_begun, nouns.job)}, {parts}"
    done = counted(work.steps, "step")
    if work.total is not None and work.steps != work.total:
        done = f"{work.steps:,} of {counted(work.total, 'step')}"
    return f"{done}, {parts}" if work.jobs_begun or work.workers else done


def _shares(workers: dict[str, WorkerShare], nouns: Nouns) -> list[str]:
    if len(workers) > MOST_LISTED:
        lost = sum(1 for share in workers.values() if share.is_lost)
        return [f"{len(workers)} workers{f', {lost} lost' if lost else ''}"]
    shares = [f"{name} {_share(share)}" for name, share in workers.items()]
    return [", ".join(shares)] if shares else []


def _share(share: WorkerShare) -> str:
    notes = [duration(share.busy_s)]
    if share.times_behind:
        notes.append(f"{share.times_behind} behind")
    if share.is_lost:
        notes.append("lost")
    return f"{share.parts:,} ({', '.join(notes)})"
