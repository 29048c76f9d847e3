"""Observing: what counters, traces and reports cost."""
