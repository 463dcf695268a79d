"""Models with many short module calls, in which the cost of an instrument is visible."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
WIDTH, HEADS = 64, 4
CHAIN_WIDTH, IN_A_ROW = 8, 9


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.gelu, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (part(normed).view(batch, length, HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(self.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]  # a module call is Any


class Transformer(nn.Module):
    """A small language model with ten module calls per block."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # a module call is Any


def chain(modules: int) -> nn.Sequential:
    """Return a model of this many tiny modules, including itself, in rows of nine."""
    rows, left = list[nn.Module](), modules - 1
    while left > 0:
        inside = min(IN_A_ROW, left - 1)
        rows.append(nn.Sequential(*(_link(place) for place in range(inside))))
        left -= inside + 1
    return nn.Sequential(*rows)


def _link(place: int) -> nn.Module:
    """Return a layer that preserves the scale of its input: multiplying numbers near zero takes longer."""
    layers = nn.Linear(CHAIN_WIDTH, CHAIN_WIDTH), nn.LayerNorm(CHAIN_WIDTH), nn.Tanh()
    return layers[place % len(layers)]
