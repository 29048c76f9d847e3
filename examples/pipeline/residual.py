"""The network: residual blocks on small images, as a chain that can be cut anywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHANNELS = 24
GROUPS = 4
CLASSES = 10


class Block(nn.Module):
    """Two convolutions and the input, added.

    Group normalization treats each image by itself, so micro-batches change nothing.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.inner_norm = nn.GroupNorm(GROUPS, channels)
        self.outer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.outer_norm = nn.GroupNorm(GROUPS, channels)

    def forward(self, images: Tensor) -> Tensor:
        inner = torch.relu(self.inner_norm(self.inner(images)))
        return torch.relu(images + self.outer_norm(self.outer(inner)))


def make_network(blocks: int, frozen: int = 0) -> nn.Sequential:
    """Returns a network from images, shape ``(batch, 1, side, side)``, to scores of classes.

    Args:
        blocks: The number of residual blocks.
        frozen: How many of the first blocks, and the layer before them, need no gradient.
    """
    first = nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU())
    last = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * CHANNELS, CLASSES))
    network = nn.Sequential(first, *[Block(CHANNELS) for _ in range(blocks)], last)
    if frozen:
        network[: 1 + frozen].requires_grad_(False)
    return network
