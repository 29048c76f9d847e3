"""Puts the state of long work into words: rows for a terminal, lines for a log, and a summary."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from torchweft.columns import printable
from torchweft.progress.work import Job, Loss, Steps, Straggler, Work, WorkerShare

GAP = "  "
MOST_LISTED = 8
"""How many workers, or parts, are listed by name or number; more are only counted."""
MOST_JOBS = 3
MOST_STRAGGLERS = 3
MOST_NEWS = 8
"""How many lines about losses and stragglers are written at once; more are only counted."""


class Nouns(NamedTuple):
    """An application's words for a job and for a part of it, in the singular."""

    job: str = "job"
    part: str = "part"


class Row(NamedTuple):
    """Texts shown side by side, on as many lines as they need."""

    texts: list[str]
    is_warning: bool = False


def live_rows(label: str, nouns: Nouns, work: Work) -> list[Row]:
    """Returns the rows to show on a terminal."""
    jobs, stragglers = work.jobs, work.stragglers()
    rows = [Row(_head(label, nouns, work))]
    rows += [Row([_parts(job, nouns), *_running(job)]) for job in jobs[:MOST_JOBS]]
    if len(jobs) > MOST_JOBS:
        rows.append(Row([f"and {counted(len(jobs) - MOST_JOBS, nouns.job)} more"]))
    for found in stragglers[:MOST_STRAGGLERS]:
        rows.append(Row([_behind(found, nouns, names_job=len(jobs) > 1)], is_warning=True))
    if len(stragglers) > MOST_STRAGGLERS:
        rows.append(Row([f"and {len(stragglers) - MOST_STRAGGLERS} more are behind"], True))
    return [Row([printable(text) for text in row.texts], row.is_warning) for row in rows]


def log_line(label: str, nouns: Nouns, work: Work) -> str:
    """Returns one line for a log with the progress of the steps and the jobs."""
    jobs = [_parts(job, nouns) for job in work.jobs[:MOST_JOBS]]
    return printable(GAP.join([*_head(label, nouns, work), *jobs]))


def news_lines(news: list[Loss | Straggler], nouns: Nouns) -> list[str]:
    """Returns lines about losses and about parts that fell behind."""
    lines = [
        _lost(each, nouns) if isinstance(each, Loss) else _behind(each, nouns, names_job=True)
        for each in news[:MOST_NEWS]
    ]
    if len(news) > MOST_NEWS:
        lines.append(f"and {len(news) - MOST_NEWS} more were lost or fell behind")
    return [printable(line) for line in lines]


def summary(
    label: str, nouns: Nouns, work: Work, seconds: float, error: type[BaseException] | None
) -> str:
    """Returns the final line, which tells how much was done, and by which workers."""
    name = label or plural(nouns.job)
    verb = f"{name}: " if error is None else f"{name} stopped by {error.__name__}: "
    failed = f"{counted(work.jobs_failed, nouns.job)} failed"
    facts = [
        f"{_work_done(work, nouns)} in {duration(seconds)}",
        *_shares(work.workers, nouns),
        *([f"{work.moves} moved"] if work.moves else []),
        *([f"{work.reruns} rerun"] if work.reruns else []),
        *([failed] if work.jobs_failed else []),
        *_slowest(work.workers, nouns),
    ]
    return printable(verb + "; ".join(facts))


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


def _behind(straggler: Straggler, nouns: Nouns, *, names_job: bool) -> str:
    of_job = f" of {short(straggler.name)}" if names_job else ""
    return (
        f"{straggler.worker} is behind: {nouns.part} {straggler.part}{of_job} "
        f"for {straggler.seconds:.1f} s (median {straggler.median_s:.1f} s)"
    )


def _head(label: str, nouns: Nouns, work: Work) -> list[str]:
    steps = work.steps
    if not steps.count and not steps.total:
        title = f"{nouns.job} {work.jobs_begun}"
        done = f"{counted(work.parts_ended, nouns.part)} done"
        return [f"{label}: {title}" if label else title, done]
    total = "" if steps.total is None else f"/{steps.total}"
    figures = [f"{name} {figure}" for name, figure in steps.figures.items()]
    return [f"{label or 'step'} {steps.count}{total}", *_pace(steps, work.clock()), *figures]


def _pace(steps: Steps, now: float) -> Iterator[str]:
    if steps.per_s:
        is_fast = steps.per_s >= 1
        yield f"{steps.per_s:.1f} steps/s" if is_fast else f"{1 / steps.per_s:.1f} s a step"
    left_s = steps.left_s(now)
    if left_s is not None:
        yield f"{clock(left_s)} left"


def _parts(job: Job, nouns: Nouns) -> str:
    return f"{plural(nouns.part)} {len(job.ended)}/{job.parts} of {short(job.name)}"


def _running(job: Job) -> list[str]:
    """Returns how many parts run on each worker; with too many workers, only how many are busy."""
    running = job.running_on()
    if not running:
        return []
    if len(running) > MOST_LISTED:
        busy = sum(1 for count in running.values() if count)
        return [f"running: {sum(running.values())} on {busy} of {len(running)} workers"]
    first, *others = (
        f"{worker} {'lost' if worker in job.lost else count}" for worker, count in running.items()
    )
    return [f"running: {first}", *others]


def _lost(loss: Loss, nouns: Nouns) -> str:
    if not loss.parts:
        return f"{loss.worker} was lost"
    if len(loss.parts) == 1:
        return f"{loss.worker} was lost; {nouns.part} {loss.parts[0]} runs again on another"
    numbers = ", ".join(str(part) for part in loss.parts[:MOST_LISTED])
    more = len(loss.parts) - MOST_LISTED
    return (
        f"{loss.worker} was lost; {plural(nouns.part)} {numbers}"
        f"{f' and {more} more' if more > 0 else ''} run again on others"
    )


def _work_done(work: Work, nouns: Nouns) -> str:
    steps, parts = work.steps, counted(work.parts_ended, nouns.part)
    if not steps.count and not steps.total:
        return f"{counted(work.jobs_begun, nouns.job)}, {parts}"
    done = counted(steps.count, "step")
    if steps.total is not None and steps.count != steps.total:
        done = f"{steps.count:,} of {counted(steps.total, 'step')}"
    return f"{done}, {parts}" if work.jobs_begun or work.workers else done


def _shares(workers: dict[str, WorkerShare], nouns: Nouns) -> list[str]:
    if len(workers) <= MOST_LISTED:
        shares = [f"{name} {_share(share)}" for name, share in workers.items()]
        return [", ".join(shares)] if shares else []
    parts = [share.parts for share in workers.values()]
    busy = [share.busy_s for share in workers.values()]
    lost = sum(1 for share in workers.values() if share.is_lost)
    return [
        f"{len(workers)} workers with {min(parts):,} to {max(parts):,} {plural(nouns.part)} "
        f"and {duration(min(busy))} to {duration(max(busy))}{f', {lost} lost' if lost else ''}"
    ]


def _share(share: WorkerShare) -> str:
    notes = [duration(share.busy_s)]
    if share.times_behind:
        notes.append(f"{share.times_behind} behind")
    if share.is_lost:
        notes.append("lost")
    return f"{share.parts:,} ({', '.join(notes)})"


def _slowest(workers: dict[str, WorkerShare], nouns: Nouns) -> list[str]:
    means = {name: share.busy_s / share.parts for name, share in workers.items() if share.parts}
    if len(means) < 2:
        return []
    slowest = max(means, key=lambda name: means[name])
    median = statistics.median(means.values())
    return [f"slowest {slowest}: {means[slowest]:.3g} s a {nouns.part}, median {median:.3g} s"]
