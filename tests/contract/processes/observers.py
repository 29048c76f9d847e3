"""Finds groups as observers do, for the tests of observing."""

from __future__ import annotations

from torchweft.launch import Cluster
from torchweft.observe.group import Group, find
from torchweft.observe.session import Access

ANSWER_S = 10.0
OPEN = Access()


def group_of(cluster: Cluster) -> Group:
    """Returns the group of a cluster, as an observer finds it."""
    return find(str(cluster.pids["worker0"]), OPEN)
