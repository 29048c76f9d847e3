"""Memory that processes of one host share.

Every worker has one piece of shared memory, an unnamed file in memory that is gone with its last
user. The worker copies outgoing tensors into *slabs* of it, which it lends to the receiver. The
tensor that the receiver makes of a slab *is* the slab. When that tensor dies, the receiver marks
the slab as free in the same memory; it sends no message.

======== ================================================================================
layout   the layout of the memory, and its mapping on either side
pool     the sender's side: slabs, loans, and their limits
borrowed the receiver's side
kernel   how much memory is left, and whether a process that borrowed is dead for certain
======== ================================================================================
"""
