"""Puts into words how maps come along: lines for a terminal, lines for a log, and a summary."""

from __future__ import annotations

import statistics
import unicodedata
from collections.abc import Iterator, Sequence

from torchweft.mapreduce.display.activity import ActivityView, Loss, MapView, WorkerShare
from torchweft.mapreduce.display.steps import Steps
from torchweft.mapreduce.display.stragglers import Straggler

GAP = "  "
MOST_LISTED = 8
"""Workers, or parts, that are listed one by one; of more there is only a count."""
MOST_MAPS = 3
MOST_STRAGGLERS = 3


def live_lines(
    label: str, steps: Steps, view: ActivityView, now: float, columns: int, rows: int
) -> list[str]:
    """Returns the lines to show on a terminal of that size, which fit into it.

    One is left free in both directions: a terminal that is filled to its last column or row goes
    on to the next.
    """
    columns = max(columns - 1, 1)
    lines = wrapped(_head(label, steps, view, now), columns)
    for seen in view.maps[:MOST_MAPS]:
        lines += wrapped([_parts(seen), *_running(seen)], columns)
    if len(view.maps) > MOST_MAPS:
        lines.append(f"and {counted(len(view.maps) - MOST_MAPS, 'map')} more")
    lines += [
        behind(found, names_map=len(view.maps) > 1) for found in view.stragglers[:MOST_STRAGGLERS]
    ]
    if len(view.stragglers) > MOST_STRAGGLERS:
        lines.append(f"and {len(view.stragglers) - MOST_STRAGGLERS} more are behind")
    return [fitted(line, columns) for line in lines[: max(rows - 2, 1)]]


def log_line(label: str, steps: Steps, view: ActivityView, now: float) -> str:
    """Returns one line for a log that says how far everything is."""
    maps = [_parts(seen) for seen in view.maps[:MOST_MAPS]]
    return printable(GAP.join([*_head(label, steps, view, now), *maps]))


def news_line(news: Loss | Straggler) -> str:
    """Returns a line that tells of a loss or of a part that fell behind."""
    return printable(_lost(news) if isinstance(news, Loss) else behind(news, names_map=True))


def behind(straggler: Straggler, *, names_map: bool) -> str:
    """Says which part of which worker is behind."""
    of_map = f" of {short(straggler.name)}" if names_map else ""
    return (
        f"{straggler.worker} is behind: part {straggler.part}{of_map} "
        f"for {straggler.seconds:.1f} s (median {straggler.median_s:.1f} s)"
    )


def summary(
    label: str, steps: Steps, view: ActivityView, seconds: float, error: type | None
) -> str:
    """Returns the line that says at the end what was done, and by whom."""
    name = label or "maps"
    verb = f"{name}: " if error is None else f"{name} stopped by {error.__name__}: "
    facts = [
        f"{_work_done(steps, view)} in {duration(seconds)}",
        *_shares(view.workers),
        *([f"{view.moved} moved"] if view.moved else []),
        *([f"{view.rerun} rerun"] if view.rerun else []),
        *_slowest(view.workers),
    ]
    return printable(verb + "; ".join(facts))


def duration(seconds: float) -> str:
    """Writes a time as ``3.2 s``, ``4:05`` or ``1:04:05``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return clock(seconds)


def clock(seconds: float) -> str:
    """Writes a time as ``0:03``, ``4:05`` or ``1:04:05``."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def counted(count: int, noun: str) -> str:
    """Writes ``1 part`` or ``2,000 parts``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def wrapped(segments: Sequence[str], columns: int) -> list[str]:
    """Puts segments behind one another, in as many lines as are needed."""
    lines: list[str] = []
    for segment in segments:
        if lines and width(lines[-1] + GAP + segment) <= columns:
            lines[-1] += GAP + segment
        else:
            lines.append(segment)
    return lines


def fitted(text: str, columns: int) -> str:
    """Cuts a text that takes more columns than there are."""
    text = printable(text)
    if width(text) <= columns:
        return text
    mark = "..."[:columns]
    while width(text) > columns - len(mark):
        text = text[:-1]
    return text + mark


def printable(text: str) -> str:
    """Leaves out what would move the cursor."""
    if text.isprintable():
        return text
    return "".join(character for character in text if character.isprintable())


def short(name: str) -> str:
    """Returns the last part of a function's name, without what ``parallelize`` has added."""
    return name.rpartition(".")[2].partition("__parallelize_")[0]


def width(text: str) -> int:
    """Returns how many columns a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _head(label: str, steps: Steps, view: ActivityView, now: float) -> list[str]:
    if not steps.count and not steps.total:
        title = f"map {view.maps_begun}"
        done = f"{counted(view.parts, 'part')} done"
        return [f"{label}: {title}" if label else title, done]
    total = "" if steps.total is None else f"/{steps.total}"
    figures = [f"{name} {figure}" for name, figure in steps.figures.items()]
    return [f"{label or 'step'} {steps.count}{total}", *_pace(steps, now), *figures]


def _pace(steps: Steps, now: float) -> Iterator[str]:
    if steps.per_s:
        is_fast = steps.per_s >= 1
        yield f"{steps.per_s:.1f} steps/s" if is_fast else f"{1 / steps.per_s:.1f} s a step"
    left_s = steps.left_s(now)
    if left_s is not None:
        yield f"{clock(left_s)} left"


def _parts(seen: MapView) -> str:
    return f"parts {seen.ended}/{seen.parts} of {short(seen.name)}"


def _running(seen: MapView) -> list[str]:
    """Says how many parts run on each worker, or, of too many workers, how many run any."""
    if not seen.running:
        return []
    if len(seen.running) > MOST_LISTED:
        busy = sum(1 for count in seen.running.values() if count)
        return [f"running: {sum(seen.running.values())} on {busy} of {len(seen.running)} workers"]
    first, *others = (
        f"{worker} {'lost' if worker in seen.lost else count}"
        for worker, count in seen.running.items()
    )
    return [f"running: {first}", *others]


def _lost(loss: Loss) -> str:
    if not loss.parts:
        return f"{loss.worker} was lost"
    if len(loss.parts) == 1:
        return f"{loss.worker} was lost; part {loss.parts[0]} runs again on another"
    numbers = ", ".join(str(part) for part in loss.parts[:MOST_LISTED])
    more = len(loss.parts) - MOST_LISTED
    return (
        f"{loss.worker} was lost; parts {numbers}{f' and {more} more' if more > 0 else ''} "
        "run again on others"
    )


def _work_done(steps: Steps, view: ActivityView) -> str:
    parts = counted(view.parts, "part")
    if not steps.count and not steps.total:
        return f"{counted(view.maps_begun, 'map')}, {parts}"
    done = counted(steps.count, "step")
    if steps.total is not None and steps.count != steps.total:
        done = f"{steps.count:,} of {counted(steps.total, 'step')}"
    return f"{done}, {parts}"


def _shares(workers: dict[str, WorkerShare]) -> list[str]:
    if len(workers) <= MOST_LISTED:
        shares = [f"{name} {_share(share)}" for name, share in workers.items()]
        return [", ".join(shares)] if shares else []
    parts = [share.parts for share in workers.values()]
    busy = [share.busy_s for share in workers.values()]
    lost = [name for name, share in workers.items() if share.is_lost]
    listed = f", {len(lost)} lost" if lost else ""
    return [
        f"{len(workers)} workers with {min(parts):,} to {max(parts):,} parts "
        f"and {duration(min(busy))} to {duration(max(busy))}{listed}"
    ]


def _share(share: WorkerShare) -> str:
    notes = [duration(share.busy_s)]
    if share.times_behind:
        notes.append(f"{share.times_behind} behind")
    if share.is_lost:
        notes.append("lost")
    return f"{share.parts:,} ({', '.join(notes)})"


def _slowest(workers: dict[str, WorkerShare]) -> list[str]:
    means = {name: share.busy_s / share.parts for name, share in workers.items() if share.parts}
    if len(means) < 2:
        return []
    slowest = max(means, key=lambda name: means[name])
    median = statistics.median(means.values())
    return [f"slowest {slowest}: {means[slowest]:.3g} s a part, median {median:.3g} s"]
