"""The model and the bookkeeping that benchmarks share."""

import json
import platform
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results"
VOCABULARY, WIDTH, DEPTH, HEADS, LENGTH, BATCH = 4096, 384, 6, 6, 32, 4


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Shape in, shape out: (batch, length, width)."""
        hidden = self.norm1(x)
        x = x + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """13.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (batch, length) tokens."""
        return self.head(self.blocks(self.embedding(x)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of telling each token from itself: the arithmetic is real, the task need not be."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def spread(values: list[float]) -> str:
    """Median, and the middle half."""
    if len(values) < 4:
        return f"{statistics.median(values):.3g}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} ({low:.3g} .. {high:.3g})"


def machine() -> str:
    """What this was measured on."""
    import os

    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"


def write(name: str, title: str, header: list[str], rows: list[list[str]], notes: str, raw: Any) -> None:
    """Writes a table to ``results/<name>.md``, its raw figures beside it, and prints it."""
    RESULTS.mkdir(exist_ok=True)
    lines = [f"# {title}", "", f"{date.today().isoformat()}; {machine()}.", "", "| " + " | ".join(header) + " |"]
    lines += ["|" + "---|" * len(header), *("| " + " | ".join(row) + " |" for row in rows), "", notes.strip(), ""]
    text = "\n".join(lines)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps(raw) + "\n")
    print(text)
