"""Mistakes that people make with Weft, as programs, and the message that each one leads to.

``python -m tests.contract.mistakes --write`` runs all of them and writes ``docs/errors.md``.
"""
