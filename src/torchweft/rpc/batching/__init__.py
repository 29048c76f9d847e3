"""Batched calls: many callers' arguments are stacked, a function runs once, each gets its row."""
