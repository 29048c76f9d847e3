"""The shell around the protocols: connections, threads, rendezvous, and the one current agent."""
