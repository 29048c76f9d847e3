"""Measures weights by version, see the README; the exit status says whether a target is missed."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.frame.report import provenance
from benchmarks.frame.run import end_on_sigterm, save
from benchmarks.frame.summary import aligned
from benchmarks.weights.work import Pauses, Sampler, Trainer, forbid, kill_in_transfer
from torchweft import cluster, knobs, rpc

SAMPLERS = 3
HEAD = ["| | versions | longest update | a batch | longest | fetching | publish | bytes sent |"]
HEAD += ["|---|---|---|---|---|---|---|---|"]


def main() -> int:
    """Runs all cases; returns 1 if a target is missed."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="of the weights in bfloat16")
    parser.add_argument("--steps", type=int, default=5, help="versions that are published")
    parser.add_argument("--kills", type=int, default=5, help="publishers that are killed")
    parser.add_argument("--save", metavar="NAME", help="also write results/<date>-NAME.md")
    options = parser.parse_args()
    size_bytes, table = options.megabytes * 10**6, list(HEAD)
    verdicts: list[tuple[str, bool]] = []
    for name, is_apart, deltas in (
        ("one host", False, 0),
        ("other hosts, whole", True, 0),
        ("other hosts, deltas", True, 2),
    ):
        print(name, file=sys.stderr, flush=True)
        table.append(_case(name, is_apart, deltas, size_bytes, options.steps, verdicts))
    shares = [(number + 0.5) / options.kills for number in range(options.kills)]
    found = [_kill(size_bytes, share) for share in shares]
    verdicts.append(
        (
            f"{len(found)} publishers killed in a transfer to {SAMPLERS} samplers: versions "
            f"{'; '.join(' '.join(str(number) for number, _ in each) for each in found)} in use, "
            "each whole",
            all(is_whole for each in found for _, is_whole in each),
        )
    )
    lines = [f"- {'met' if is_met else 'MISSED'}: {text}" for text, is_met in verdicts]
    head = ["# Weights by version", "", provenance(), ""]
    about = f"{options.megabytes} MB in bfloat16, {SAMPLERS} samplers, one trainer, Adam at 1e-6."
    report = "\n".join([*head, about, "", *aligned(table), "", *lines]) + "\n"
    print(report)
    if options.save:
        save(report, Path(__file__).parent, options.save)
    return 0 if all(is_met for _, is_met in verdicts) else 1


@contextlib.contextmanager
def _apart(is_apart: bool) -> Iterator[None]:
    """Makes tensors of workers that start within the block travel as to other hosts."""
    with contextlib.ExitStack() as stack:
        if is_apart:
            stack.enter_context(knobs.SHM_LIMIT_BYTES.override(0))
            stack.enter_context(knobs.CMA_FROM_BYTES.override(1 << 60))
        yield


def _case(
    name: str,
    is_apart: bool,
    deltas: int,
    size_bytes: int,
    steps: int,
    verdicts: list[tuple[str, bool]],
) -> str:
    with _apart(is_apart), cluster(workers=SAMPLERS) as group:
        trainer = Trainer(size_bytes, deltas)
        trainer.publisher.publish()
        samplers = rpc.actors(group.names, Sampler, trainer.reference(), size_bytes)
        for call in samplers.rpc_async(Sampler.begin):
            call.wait()
        sent, counted = rpc.traffic().bytes_sent, trainer.publisher.statistics()
        for _ in range(steps):
            version = trainer.step()
            for coming in samplers.rpc_async(Sampler.await_version, version):
                coming.wait()
        sent = rpc.traffic().bytes_sent - sent
        found: list[Pauses] = samplers.rpc_sync(Sampler.pauses)
        ends = samplers.rpc_sync(Sampler.end)
        counts = trainer.publisher.statistics()
        expected = (trainer.publisher.version, trainer.sums())
        verdicts.append((f"{name}: all samplers have the last version", ends == [expected] * 3))
        samplers.rpc_sync(Sampler.close)
    update_s, batch_s = (_most(found, key) for key in ("longest_update_s", "batch_s"))
    verdicts.append(
        (f"{name}: an update takes at most a batch ({update_s / batch_s:.3f})", update_s <= batch_s)
    )
    # A sampler stops for a fetch as far as its batches take longer than they do without one.
    fetching = sum(each.fetching for each in found)
    stop_s = max(each.longest_fetching_s - each.longest_alone_s for each in found)
    verdicts.append(
        (
            f"{name}: a fetch stops a sampler for at most a batch "
            f"({max(0.0, stop_s) / batch_s:.3f}; {fetching} batches during fetches)",
            stop_s <= batch_s,
        )
    )
    copies = 3 * steps * trainer.size_bytes
    if not is_apart:
        shared = counts.shared - counted.shared
        is_met = counts.wholes == counts.deltas == 0 and shared == 3 * steps
        is_met &= sent <= 0.01 * copies  # messages, and no weights
        verdicts.append((f"{name}: no byte copied; {shared} answers by shared memory", is_met))
        moved = f"{sent / steps / 1e6:.2f} MB a version"
    elif not deltas:
        verdicts.append((f"{name}: {sent / copies:.4f} of three copies", sent <= 1.05 * copies))
        moved = f"{sent / steps / 1e6:.1f} MB a version"
    else:
        verdicts.append((f"{name}: {sent / copies:.4f} of three copies", sent <= 0.05 * copies))
        moved = f"{sent / steps / 1e6:.2f} MB a version"
    longest = [_most(found, f"longest_{which}_s") for which in ("alone", "fetching")]
    milliseconds = [update_s, batch_s, *longest, counts.longest_publish_s]
    cells = [f"{1e3 * each:.2f} ms" for each in milliseconds]
    return f"| {' | '.join([name, str(steps), *cells, moved])} |"


def _most(found: list[Pauses], name: str) -> float:
    values: list[float] = [getattr(each, name) for each in found]
    return min(values) if name == "batch_s" else max(values)


def _kill(size_bytes: int, share: float) -> list[tuple[int, bool]]:
    with cluster(workers=SAMPLERS, check=False) as group:
        trainer, *others = group.names
        for name in (rpc.get_worker_info().name, *others):
            rpc.rpc_sync(trainer, forbid, (name,))
        return kill_in_transfer(trainer, others, group.pids[trainer], size_bytes, share)


if __name__ == "__main__":
    sys.exit(main())
