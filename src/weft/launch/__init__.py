"""Starting workers: many processes of one script, or a cluster around the calling program.

Nothing here imports torch by itself: the command line answers at once, and workers of ``weft
run`` that do without torch start without it.
"""

from weft.launch.local_cluster import Cluster, cluster
from weft.launch.nursery import Nursery
from weft.launch.restarts import RestartPolicy
from weft.launch.run import run_workers

__all__ = ["Cluster", "Nursery", "RestartPolicy", "cluster", "run_workers"]
