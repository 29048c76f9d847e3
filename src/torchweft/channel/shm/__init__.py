"""Memory that processes of one host share.

Every worker has one piece of shared memory, an unnamed file in memory that is gone with its last
user. It copies what it sends into *slabs* of it, which it lends to the receiver; the tensor that
the receiver makes of one *is* the slab. When that tensor dies the receiver writes down, in the
same memory, that the slab is free; no message says so.

======== ================================================================================
layout   what is where, and how it is mapped on either side
extents  which ranges of the memory are in nobody's use
pool     the sender's side: slabs, loans, and what bounds them
lending  the sender's side towards one peer
borrowed the receiver's side
headroom how much memory the machine, or a container's limit, has left
liveness whether a process that borrowed is dead for certain
======== ================================================================================
"""
