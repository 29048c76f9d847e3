"""Whole training programs: an RNN, a parameter server, DDP with a remote embedding, an agent."""
