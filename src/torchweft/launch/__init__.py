"""Starts workers: many processes of one script, or a cluster around the calling program.

Importing this package does not import torch. So the command line answers at once, and workers of
``torchweft run`` that do not need torch start without it.
"""

from torchweft.launch.local_cluster import Cluster
from torchweft.launch.making import cluster
from torchweft.launch.nursery import Nursery
from torchweft.launch.restarts import RestartPolicy
from torchweft.launch.run import run_workers

__all__ = ["Cluster", "Nursery", "RestartPolicy", "cluster", "run_workers"]
