"""Traces of a whole group: recorded on all workers, joined at one worker, written as one file.

``session`` leads a trace, ``recorder`` and ``notes`` record at each worker, ``joining`` finds both
ends of each message and call, ``chrome`` writes them for Perfetto, ``graph`` draws the distributed
graph of a context, and ``reading`` summarises a file for ``torchweft trace``.
"""
