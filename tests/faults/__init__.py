"""Random faults in training runs: every run ends as it must, nothing hangs, nothing is left.

``python -m tests.faults --runs 200`` runs a small distributed training 200 times, each time with
other faults, drawn from the number of the run. ``--only 17`` repeats one run.

``--maps`` trains by maps instead, which continue without lost workers (``map_plan``, ``maps``).

``plan``: the events of a run. ``model``: the training. ``points``: places in the code where a fault
can strike. ``worker``: one process. ``running``: forks the workers and injects faults.
``verdict``: checks the outcome.
"""
