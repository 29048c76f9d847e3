"""Weights by version: pauses of samplers, bytes moved, deltas, and killed publishers."""
