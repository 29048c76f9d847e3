"""Serves a model to many clients: ``python examples/inference_server/serve.py``.

The clients ask twice: the server runs the model once for each request, then once for a batch.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from server import Server, ask

import torchweft as weft
from torchweft import rpc
from torchweft.rpc import functions

WAYS = {"one by one": "classify_alone", "batched": "classify"}


def measure(server: rpc.RRef[Server], clients: list[str], way: str, options: Any) -> dict[str, Any]:
    """Has all clients ask at once; returns the figures."""
    began_s = time.perf_counter()
    calls = [
        rpc.rpc_async(name, ask, (server, way, k, options.threads, options.requests), timeout=0)
        for k, name in enumerate(clients)
    ]
    found = [call.wait() for call in calls]
    seconds = time.perf_counter() - began_s
    latencies = torch.tensor([latency for each in found for latency in each.latencies_s])
    return {
        "answers": len(latencies),
        "answers_per_s": len(latencies) / seconds,
        "median_ms": 1e3 * float(latencies.quantile(0.5)),
        "p99_ms": 1e3 * float(latencies.quantile(0.99)),
        "largest_difference": max(each.difference for each in found),
    }


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Runs server and clients; prints and returns the figures."""
    figures: dict[str, Any] = {}
    with weft.cluster(workers=1 + options.clients) as cluster:
        name, *clients = cluster.names
        server = rpc.remote(name, Server)
        for title, way in WAYS.items():
            found = figures[title] = measure(server, clients, way, options)
            print(
                f"{title}: {found['answers_per_s']:,.0f} answers/s; a client waited for "
                f"{found['median_ms']:.1f} ms (median), {found['p99_ms']:.1f} ms (99 %)"
            )
        done = rpc.rpc_sync(name, functions.batch_statistics, (Server.classify, server))
    figures["batches"] = {
        "batches": done.batches,
        "mean_size": done.mean_size,
        "median_size": done.size_percentile(50),
        "largest_size": max(done.sizes),
        "median_wait_ms": 1e3 * done.wait_percentile_s(50),
        "p99_wait_ms": 1e3 * done.wait_percentile_s(99),
        "busy_s": done.run_s,
        "refused": done.refused,
        "failed": done.failed,
    }
    print(
        f"{done.batches:,} batches for {done.calls:,} requests: {done.mean_size:.1f} at a time, "
        f"{max(done.sizes)} at most; a request waited in the queue for "
        f"{1e3 * done.wait_percentile_s(50):.1f} ms (median), "
        f"{1e3 * done.wait_percentile_s(99):.1f} ms (99 %); {done.refused} refused"
    )
    return figures


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=3, help="workers that ask")
    parser.add_argument("--threads", type=int, default=16, help="of each, all of which ask")
    parser.add_argument("--requests", type=int, default=200, help="of each thread, in a row")
    parser.add_argument("--out", type=Path, help="folder for figures.json; default: runs/TIME")
    options = parser.parse_args()
    figures = serve(options)
    folder = options.out or Path("runs") / time.strftime("%Y-%m-%d-%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    (folder / "figures.json").write_text(json.dumps({"settings": settings, **figures}, indent=1))
    print(f"figures in {folder}")


if __name__ == "__main__":
    main()
