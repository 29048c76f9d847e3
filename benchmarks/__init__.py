"""Measurements of Weft beside what it replaces, both sides in one run."""
