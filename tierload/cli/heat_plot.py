"""The pictures of ``tierload heat --plot``: the heat of each layer, and how it has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tierload.cli.text import clean
from tierload.errors import InvalidRequest
from tierload.types import Commit

__all__ = ["check_plot", "draw"]

_NAMED = 10  # lines that have a name: the hottest ones
_BARS = 40  # as many bars can be told apart


def check_plot(to: str) -> None:
    """Before anything is read.

    Raises:
        InvalidRequest: The name is of no picture, or matplotlib is missing.
    """
    if Path(to).suffix not in (".png", ".svg"):
        raise InvalidRequest(f"{to} is no name of a picture; use one that ends with .png or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidRequest("--plot needs matplotlib: pip install 'tierload[plots]'") from None


def draw(
    to: str, title: str, rows: Sequence[tuple[str, float]], past: Sequence[tuple[Commit, Mapping[str, float]]]
) -> None:
    """Draws the rows of a table (name and heat) from top to bottom, and their heat over the commits."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    hottest = sorted(rows, key=lambda row: -row[1])
    kept = {name for name, _ in hottest[:_BARS]}
    bars = [row for row in rows if row[0] in kept]
    figure = Figure(figsize=(12, max(4.0, 1 + 0.22 * len(bars))), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.barh([_label(name) for name, _ in bars], [heat for _, heat in bars])
    left.invert_yaxis()
    some = f", the {len(bars)} hottest of {len(rows)}" if len(bars) < len(rows) else ""
    left.set(title=f"heat at {title}{some}", xlim=(0, 1))
    numbers = [number if commit.step is None else commit.step for number, (commit, _) in enumerate(past)]
    for place, (name, _) in enumerate(hottest):
        heats = [heats.get(name, float("nan")) for _, heats in past]
        named = place < _NAMED
        style = {"label": _label(name)} if named else {"color": "lightgrey", "zorder": 0}
        right.plot(numbers, heats, marker=".", **style)
    right.set(title="heat of commits, the hottest named", xlabel="step", ylim=(0, 1.02))
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(to)


def _label(name: str) -> str:
    """A name as text, which matplotlib might take for a formula."""
    return clean(name).replace("$", r"\$")
