"""The I/O shell of the protocols: connections, threads, rendezvous, and the current agent."""
