"""A small decoder as language models have it: rotary positions, a mask, a tied head, a dict."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HEADS, WORDS = 8, 2, 13


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        parts = self.qkv(hidden).view(rows, length, 3, HEADS, WIDTH // HEADS).unbind(2)
        query, key, value = (each.transpose(1, 2) for each in parts)
        query, key = (turned(each, *rotary) for each in (query, key))
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        mixed = scores.masked_fill(~mask, -1e9).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


def turned(each: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = each.chunk(2, -1)
    return each * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    """Attention and a feed-forward network, with a skip around each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH))
        self.dropout = 0.0

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        mixed = self.attention(self.norm1(hidden), rotary, mask=mask)
        hidden = hidden + nn.functional.dropout(mixed, self.dropout, training=self.training)
        return hidden + self.mlp(self.norm2(hidden))


class Rotary(nn.Module):
    """Cosines and sines of the positions."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 10.0 ** -torch.arange(0, 1, 2 * HEADS / WIDTH)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, :, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


class Backbone(nn.Module):
    """All but the head."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        length = tokens.shape[1]
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        rotary = self.rotary(positions)
        causal = torch.ones((length, length), dtype=torch.bool, device=tokens.device).tril()
        mask = causal & attention_mask[:, None, None, :].bool()
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rotary, mask)
        return self.norm(hidden)


class Decoder(nn.Module):
    """A language model.

    Args:
        count: How many layers.
        seed: Of the weights.
    """

    def __init__(self, count: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Backbone(count)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.model.embed.weight
        self.double()

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, with_hidden: bool = False
    ) -> dict[str, Tensor]:
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens)
        hidden = self.model(tokens, attention_mask=attention_mask)
        output = {"logits": self.head(hidden)}
        if with_hidden:
            output["hidden"] = hidden
        return output


def token_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Returns the mean cross entropy over all positions."""
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())
