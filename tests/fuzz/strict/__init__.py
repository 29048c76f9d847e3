"""A strict worker in this process, and a grammar of messages from a member of its group.

``program`` has registered and unregistered objects. ``world`` is the worker with its agent, but
without sockets and threads. ``watching`` notes the worker's actions. ``grammar`` makes messages.
"""
