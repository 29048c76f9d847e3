"""What a worker tells an observer, and what follows from the reports of all workers.

``report`` has the answers of a worker, ``latency`` the histograms of the times of calls, ``waits``
the graph of who waits for whom, ``circles`` its stuck parts, and ``wording`` the text of both. All
of it is pure: an observer, a file that a worker has written, and a test use the same functions.
"""
