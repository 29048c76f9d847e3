"""What a worker tells an observer, and what follows from the reports of all workers.

``report`` has the answers of a worker, and ``latency`` the histograms of the times of calls.
``waits`` has the graph of who waits for whom, ``circles`` its stuck parts, ``wording`` the text of
both. All of it is pure: it serves answers of workers, files that they have written, and tests.
"""
