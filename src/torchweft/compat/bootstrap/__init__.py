"""The folder that a Python process searches first if its parent had Weft installed."""
