"""torchrl's replay buffer on another worker: extended and sampled over RPC."""
