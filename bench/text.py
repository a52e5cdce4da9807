"""Real text that every Python brings along: the sources of its own standard library, as a stream of bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["TextStream", "standard_library"]


# Tests, and tables of data in the shape of modules: neither reads like Python.
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "_pydecimal.py"}


def standard_library(limit_bytes: int = 8 << 20) -> torch.Tensor:
    """The first ``limit_bytes`` of the standard library's modules and packages, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    left = limit_bytes
    parts: list[bytes] = []
    for path in _sources(root):
        parts.append(path.read_bytes()[:left])
        left -= len(parts[-1])
        if left <= 0:
            break
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in _LEFT_OUT:
            continue
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


class TextStream:
    """Reads a text in ``batch`` lanes, each from its own place; ``position`` says how far the lanes have come.

    It is the part of a training state that is most often forgotten: without it a resumed run reads the text from its
    beginning again. ``state_dict`` is all that a checkpoint needs to see.
    """

    def __init__(self, text: torch.Tensor, *, batch: int, context: int) -> None:
        self.lanes = text[: len(text) // batch * batch].view(batch, -1)
        self.context = context
        self.position = 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each (batch, context), int64."""
        if self.position + self.context + 1 > self.lanes.shape[1]:
            self.position = 0
        window = self.lanes[:, self.position : self.position + self.context + 1].long()
        self.position += self.context
        return window[:, :-1], window[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
