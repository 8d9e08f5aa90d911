"""The model, the statistics and the tables that all benchmarks share."""

import json
import platform
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results"
# Of a Trainer that does nothing but train.
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
VOCABULARY, WIDTH, DEPTH, HEADS, LENGTH, BATCH = 4096, 384, 6, 6, 32, 4


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        hidden = self.norm1(x)
        x = x + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A transformer with 13.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of (batch, length) tokens."""
        return self.head(self.blocks(self.embedding(x)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of predicting each token from itself: only the arithmetic has to be realistic."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def spread(values: list[float]) -> str:
    """Return the median and the middle half as text."""
    if len(values) < 4:
        return f"{statistics.median(values):.3g}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} ({low:.3g} .. {high:.3g})"


def machine() -> str:
    """Return a description of this machine."""
    import os

    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"


def write(name: str, title: str, header: list[str], rows: list[list[str]], notes: str, raw: Any) -> None:
    """Write a table to ``results/<name>.md`` and its raw figures to ``results/<name>.json``, and print the table."""
    RESULTS.mkdir(exist_ok=True)
    lines = [f"# {title}", "", f"{date.today().isoformat()}; {machine()}.", "", "| " + " | ".join(header) + " |"]
    lines += ["|" + "---|" * len(header), *("| " + " | ".join(row) + " |" for row in rows), "", notes.strip(), ""]
    text = "\n".join(lines)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps(raw) + "\n")
    print(text)
