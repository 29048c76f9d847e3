"""Large tensors over connections of their own, several to a peer.

On the one control link a tensor of 1 GiB would hold up every small call behind it for as long as
it takes, and one TCP stream is one thread's copying on either side. So such a tensor is cut into
*stripes*, and those travel over *data connections*: a few to each peer, dialled by the sender when
first needed, one way only. A stripe says which *transfer* it is a part of and where it belongs;
the receiver puts it there straight away, whichever connection it came by.

Rules of this folder:

- Nothing blocks. A few threads of one *transfer loop*, of ``torchweft.runtime.transfer_loop``,
  wait for all data connections of a worker. So neither a slow peer nor two workers that send to
  each other keep a connection from being read.
- Every connection has one owner at a time: nobody (idle), a thread, or the loop's ``epoll``. Who
  owns it passes it on; so a lock is needed only against ``close``.
- Transfers take turns, a stripe each: the second one does not wait for the end of the first.

====== =======================================================================
stripes  the header of a stripe, and what a valid one is
outgoing transfers that wait to be sent, and connections that write their stripes
arriving transfers that are being received, and connections that read their stripes
====== =======================================================================
"""
