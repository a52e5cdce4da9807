"""``tierload heat``: what of a model was hot when a commit was saved, layer by layer, and how that has changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tierload.cli.arguments import AsJson, OptionalWhich, StorePath
from tierload.cli.opening import reading
from tierload.cli.output import print_json, print_table, say
from tierload.cli.text import clean, command, commit_json, counted, name, size, step, to_json
from tierload.cli.which import find
from tierload.errors import InvalidRequest
from tierload.types import Commit, HeatTable

if TYPE_CHECKING:
    from tierload.engine import Store

__all__ = ["heat"]

_COLUMNS = 10  # commits of the history that a table shows; --json and --plot have all


class By(StrEnum):
    """What a row is."""

    layer = "layer"
    parameter = "parameter"


class Sort(StrEnum):
    """What comes first."""

    use = "use"
    heat = "heat"


@dataclass(frozen=True, slots=True)
class Row:
    """A parameter; or a layer, with the means of its parameters and the first use of one. Use None: the last step did
    not use it."""

    name: str
    gradient: float
    radius: float
    locality: float
    heat: float
    first_use: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Past:
    """The heat of each row in one commit."""

    commit: Commit
    heats: Mapping[str, float]


def heat(
    path: StorePath,
    which: OptionalWhich = None,
    by: Annotated[By, typer.Option("--by", help="A row for each layer, or parameter.")] = By.layer,
    sort: Annotated[Sort, typer.Option("--sort", help="In the order of first use, or the hottest first.")] = Sort.use,
    history: Annotated[bool, typer.Option("--history", help="How heat has changed over the head's line.")] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw it all into a .png or .svg.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows what of a model was hot when a commit was saved.

    For commits that were saved with a heat meter: tierload.save(..., heat=meter), Session(..., heat=True).
    """
    if plot is not None:
        from tierload.cli.heat_plot import check_plot

        check_plot(plot)
    with reading(path) as store:
        commit = find(store, which)
        table = store.heat(commit)
        if table is None and plot is not None:
            raise InvalidRequest(f"commit {name(commit)} has no heat to draw: it was saved without a meter (heat=)")
        rows = [] if table is None else _rows(table, {info.key: info.nbytes for info in store.keys(commit)}, by)
        rows.sort(key=_ORDERS[sort])
        past = list(_past(store, by)) if history or plot is not None else []
        if as_json:
            print_json(_document(path, commit, by, None if table is None else rows, past if history else None))
        elif table is None:
            say(f"commit {name(commit)} has no heat: it was saved without a meter (heat=)")
        elif history:
            _print_history(path, rows, past)
        else:
            _print_rows(rows, by)
        if plot is not None:
            from tierload.cli.heat_plot import draw

            draw(plot, name(commit), [(row.name, row.heat) for row in rows], [(one.commit, one.heats) for one in past])


_ORDERS: Mapping[Sort, Callable[[Row], tuple[float, str]]] = {
    Sort.use: lambda row: (float("inf") if row.first_use is None else row.first_use, row.name),
    Sort.heat: lambda row: (-row.heat, row.name),
}


def _layer(key: str) -> str:
    """The module that has a parameter: its key without the last name."""
    found = re.match(r"(.*)[./]", key)
    return found[1] if found else "(root)"


def _rows(table: HeatTable, nbytes: Mapping[str, int], by: By) -> list[Row]:
    uses = [None if use < 0 else use for use in table.first_use.tolist()]
    terms = (table.gradient.tolist(), table.radius.tolist(), table.locality.tolist(), table.heat.tolist())
    rows = [
        Row(key, gradient, radius, locality, heat, use, nbytes.get(key, 0))
        for key, gradient, radius, locality, heat, use in zip(table.keys, *terms, uses, strict=True)
    ]
    if by is By.parameter:
        return rows
    layers: dict[str, list[Row]] = {}
    for row in rows:
        layers.setdefault(_layer(row.name), []).append(row)
    return [_mean(layer, inside) for layer, inside in layers.items()]


def _mean(layer: str, rows: Sequence[Row]) -> Row:
    uses = [row.first_use for row in rows if row.first_use is not None]
    return Row(
        name=layer,
        gradient=sum(row.gradient for row in rows) / len(rows),
        radius=sum(row.radius for row in rows) / len(rows),
        locality=sum(row.locality for row in rows) / len(rows),
        heat=sum(row.heat for row in rows) / len(rows),
        first_use=min(uses, default=None),
        bytes=sum(row.bytes for row in rows),
    )


def _past(store: Store, by: By) -> Iterator[Past]:
    """What commits of the head's line say, the oldest first; of those that say something."""
    for commit in reversed(store.commits()):
        table = None if commit.superseded else store.heat(commit)
        if table is not None:
            yield Past(commit, {row.name: row.heat for row in _rows(table, {}, by)})


def _print_rows(rows: Sequence[Row], by: By) -> None:
    print_table(
        (by.value, "gradient", "radius", "locality", "heat", "use", "size"),
        [
            (
                clean(row.name),
                f"{row.gradient:.3g}",
                f"{row.radius:.3g}",
                f"{row.locality:.2f}",
                f"{row.heat:.2f}",
                "-" if row.first_use is None else str(row.first_use),
                size(row.bytes),
            )
            for row in rows
        ],
        right=("gradient", "radius", "locality", "heat", "use", "size"),
        fold=(by.value,),
    )
    means = "; gradient, radius, locality and heat are means over their parameters" if by is By.layer else ""
    say(counted(len(rows), by.value) + means, "dim")


def _print_history(path: str, rows: Sequence[Row], past: Sequence[Past]) -> None:
    """The heat of each row in some commits, from the oldest to the newest of them."""
    last = len(past) - 1
    shown = past if last < _COLUMNS else [past[round(n * last / (_COLUMNS - 1))] for n in range(_COLUMNS)]
    steps = [step(one.commit) for one in shown]
    print_table(
        ("heat at step", *steps),
        [
            (clean(row.name), *(f"{one.heats[row.name]:.2f}" if row.name in one.heats else "-" for one in shown))
            for row in rows
        ],
        right=steps,
        fold=("heat at step",),
    )
    if len(shown) < len(past):
        say(f"{len(shown)} of {len(past)} commits; all: {command('heat', path, '--history', '--json')}", "dim")


def _document(
    path: str, commit: Commit, by: By, rows: Sequence[Row] | None, past: Sequence[Past] | None
) -> dict[str, object]:
    return {
        "store": path,
        "commit": commit_json(commit),
        "by": by.value,
        "rows": None if rows is None else [to_json(asdict(row)) for row in rows],
        "history": None
        if past is None
        else [{"commit": one.commit.id, "step": one.commit.step, "heat": to_json(dict(one.heats))} for one in past],
    }
