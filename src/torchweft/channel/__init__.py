"""Tensor memory between two processes.

A message is one control part and a table of buffers. For every buffer the sender takes the best
channel that works for that peer (``choice``); the receiver gets memory of its own, warm and
writable, whichever way the bytes came.

======= =================================================================================
inline  the bytes follow the control part, small enough to be copied out of the receive buffer
stream  the bytes follow the control part, received straight into leased memory (``memory``)
shm     the sender copies into memory that both have mapped; only the place travels (``shm``)
cma     only the address travels; the receiver pulls the bytes out of the sender's memory
striped the bytes come in pieces over connections of their own (``transport.striped``)
======= =================================================================================
"""
