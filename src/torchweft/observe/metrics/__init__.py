"""The counters of workers for other monitoring: served for Prometheus, or as plain data.

The numbers are those of ``torchweft top``: the reports of workers, asked when they are wanted, so
nothing is counted twice. ``measures`` names them as OpenTelemetry does, ``reading`` asks this
worker or the whole group, and ``prometheus`` serves them; only that file imports a package that
not everybody has.
"""

from __future__ import annotations

from torchweft.observe.metrics.measures import Distribution, Metric, Point
from torchweft.observe.metrics.serving import Server, read, serve

__all__ = ["Distribution", "Metric", "Point", "Server", "read", "serve"]
