"""Transfers tensor memory between two processes.

A message is one control part and a table of buffers. For every buffer the sender takes the best
channel that works for that peer (``choice``). On every channel the receiver gets its own memory,
warm and writable.

======= =================================================================================
inline  the bytes follow the control part, small enough to be copied out of the receive buffer
stream  the bytes follow the control part, received straight into leased memory (``memory``)
shm     the sender copies into memory that both have mapped; only the offset travels (``shm``)
cma     only the address travels; the receiver pulls the bytes out of the sender's memory
striped the bytes come in pieces over separate data connections (``transport.striped``)
rdma    the sender copies into registered memory, which the receiver reads (``rdma``, ``slabs``)
======= =================================================================================
"""
