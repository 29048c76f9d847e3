"""Reinforcement learning: environment steps of observers that share an agent."""
