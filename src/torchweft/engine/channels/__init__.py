"""Transfers tensor memory between two processes.

A message is one control part and a table of buffers. For every buffer the sender takes the first
channel of the list in ``channels`` that works for that peer and has room. On every channel the
receiver gets its own memory, warm and writable.

========== ==============================================================================
inline     the bytes follow the control part, small enough to be copied out of the receive buffer
stream     the bytes follow the control part, received straight into leased memory (``memory``)
cuda_ipc   the receiver copies from the sender's device (``cuda``)
shm        the sender copies into memory that both have mapped; only the place travels (``shm``)
cma        the receiver pulls the bytes out of the sender's memory (``pull``)
rdma       the sender copies into registered memory, which the receiver reads (``rdma``)
striped    the bytes come in pieces over separate data connections (``stripes``)
========== ==============================================================================

A new channel is a module with a subclass of ``channel.Channel``, and a line in the list.
"""
