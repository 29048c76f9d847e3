"""Lets programs that name GPUs run where there are none: what they ask for is the CPU."""

from types import SimpleNamespace

import torch


class TorchOnCpu:
    """All of torch, but for the two places in which the programs name a GPU."""

    def __init__(self):
        self.asked_for = []
        self.cuda = SimpleNamespace(set_device=self.asked_for.append)

    def device(self, name):
        self.asked_for.append(name)
        return torch.device("cpu")

    def __getattr__(self, name):
        return getattr(torch, name)
