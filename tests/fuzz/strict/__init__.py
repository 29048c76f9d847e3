"""A strict worker in this process, and a grammar of what a member of its group may send to it.

``program`` is what the worker has registered and what it has not, ``world`` the worker with its
agent, but without sockets and threads, ``watching`` notes what it does, ``grammar`` makes messages.
"""
