"""Mistakes that people make with Weft, as programs, and what a person sees of each.

``python -m tests.mistakes --write`` runs all of them and writes ``docs/errors.md``.
"""
