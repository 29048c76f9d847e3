"""Benchmarks of Weft beside the libraries that it replaces, both sides in one run."""
