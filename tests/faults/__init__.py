"""Random faults in training runs: every run ends as it must, nothing hangs, nothing is left.

``python -m tests.faults --runs 200`` runs a small distributed training so often, each time with
faults of its own, drawn from the number of the run. ``--only 17`` runs one again.

``--maps`` has training by maps instead, which goes on without those who are lost (``map_plan``,
``maps``).

``plan``: what happens in a run. ``model``: what is trained. ``points``: where in the code a fault
can strike. ``worker``: one process. ``running``: forks the workers, and does things to them.
``verdict``: whether all is as it must be.
"""
