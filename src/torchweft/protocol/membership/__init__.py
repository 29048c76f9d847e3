"""Group membership: how workers join, know each other, and leave.

A *closed* group has a number of workers and a leader, rank 0: all join together and leave together.
An *open* group has neither: workers come and go one by one. Both kinds share these machines as far
as possible:

``registration``
    A worker's description of itself, and whether workers fit together; the lives that a worker
    knows, and the names by which programs find them.
``joining``
    The order in which a worker writes, reads and waits for keys of the rendezvous store.
``leaving``
    When a worker may go: alone, or as one of a closed group.
``leader``
    When a closed group is quiet, so that all may go.

``docs/protocols/membership.md`` has the messages, the guarantees and the scenarios.
"""
