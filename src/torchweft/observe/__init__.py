"""Shows what the workers of a running group do, from outside of the group.

``session`` asks one worker, ``group`` finds the workers of a group and asks all of them, ``text``
and ``live`` show the answers, and ``files`` reads the reports that workers have written. Nothing
here imports torch, so that the command line answers at once.
"""
