"""What a worker tells an observer, and what follows from the reports of all workers.

``report`` has the answers of a worker, and ``waits`` the graph of who waits for whom, with its
text. All of it is pure: it serves answers of workers, files that they have written, and tests.
"""
