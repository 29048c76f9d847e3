"""The launcher for this machine."""

from __future__ import annotations

import argparse

from torchweft.launch.launchers import Launcher, Order
from torchweft.launch.local_cluster import Cluster
from torchweft.launch.restarting_cluster import RestartingCluster
from torchweft.launch.run import run_workers
from torchweft.launch.terms import Terms


class Local(Launcher):
    """Starts workers on this machine."""

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Local:
        """Returns the launcher; it has no options."""
        return cls()

    def run(self, order: Order) -> int:
        """Runs a script in worker processes of this machine; see ``run_workers``."""
        return run_workers(
            order.names,
            order.job,
            console=order.console,
            master_port=order.master_port,
            is_warm=order.is_warm,
            restarts=order.restarts,
            seed=order.seed,
            metrics=order.metrics,
        )

    def cluster(self, terms: Terms) -> Cluster:
        """Returns a cluster of processes of this machine, which meet without a network."""
        return RestartingCluster(terms) if terms.restarts else Cluster(terms)
