"""Sends large tensors over data connections, several to each peer.

On the one control link a tensor of 1 GiB would delay every small call behind it, and one TCP
stream is limited to one thread's copying on either side. So such a tensor is cut into *stripes*,
which travel over *data connections*: a few to each peer, dialled by the sender when first needed,
one way only. A stripe names its *transfer* and its place in it; the receiver reads it straight
into that place, over whichever connection it arrives.

Rules of this folder:

- Nothing blocks. A few threads of one *transfer loop*, of ``torchweft.runtime.transfer_loop``,
  wait for all data connections of a worker. So neither a slow peer nor two workers that send to
  each other keep a connection from being read.
- Every connection has one owner at a time: nobody (idle), a thread, or the loop's ``epoll``. The
  owner passes it on; so a lock is needed only against ``close``.
- Transfers take turns, a stripe each: a second transfer does not wait for the end of the first.

======== =======================================================================
stripes  the header of a stripe, and its validation
outgoing transfers that wait to be sent, and connections that write their stripes
arriving transfers that are being received, and connections that read their stripes
======== =======================================================================
"""
