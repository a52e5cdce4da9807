"""What does not match between a store and the target of a load: collected for the whole target, then told at once."""

from __future__ import annotations

from collections.abc import Sequence

from tierload.errors import KeyMismatch
from tierload.state.keys import Path
from tierload.types import LoadReport

__all__ = ["Problems"]

_SHOWN_MAX = 100


_MISSING = "is in the target and not in the store"
_UNEXPECTED = "is in the store and not in the target"


class Problems:
    """Keys by what is wrong with them, and a line of explanation for each."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[str, str]] = {"missing": {}, "unexpected": {}, "shapes": {}, "dtypes": {}}
        self._advice: dict[str, None] = {}

    def missing(self, path: Path, line: str = _MISSING) -> None:
        """The target has this and the store does not, or cannot give it."""
        self._keys["missing"].setdefault(path.text(), line)

    def unexpected(self, path: Path, line: str = _UNEXPECTED) -> None:
        """The store has this and the target does not, or cannot take it."""
        self._keys["unexpected"].setdefault(path.text(), line)

    def shapes(self, path: Path, line: str) -> None:
        """Shapes differ; nothing is broadcast."""
        self._keys["shapes"].setdefault(path.text(), line)

    def dtypes(self, path: Path, line: str) -> None:
        """Dtypes or kinds of value differ."""
        self._keys["dtypes"].setdefault(path.text(), line)

    def advise(self, text: str) -> None:
        """What the user can do, said once at the end of the message."""
        self._advice[text] = None

    def lines(self) -> list[str]:
        """One line a problem."""
        return [f"{key or 'the state'}: {line}" for keys in self._keys.values() for key, line in sorted(keys.items())]

    def refuse(self) -> None:
        """Tell everything that has been collected.

        Raises:
            KeyMismatch: There is something.
        """
        lines = self.lines()
        if not lines:
            return
        shown = lines[:_SHOWN_MAX] + ([f"and {len(lines) - _SHOWN_MAX} more"] if len(lines) > _SHOWN_MAX else [])
        advice = " ".join(
            [*self._advice, "keys=[...] loads a part; strict=False loads what matches and reports the rest."]
        )
        raise KeyMismatch(
            f"the store and the target differ in {len(lines)} places, and nothing was changed:\n  "
            + "\n  ".join(shown)
            + f"\n{advice}",
            **{name: sorted(keys) for name, keys in self._keys.items()},
        )

    def report(self, loaded: Sequence[str], cast: Sequence[str], notes: Sequence[str]) -> LoadReport:
        """The report of a load that went on in spite of them."""
        missing, unexpected, shapes, dtypes = (
            tuple(sorted(self._keys[name])) for name in ("missing", "unexpected", "shapes", "dtypes")
        )
        told = [line for line in self.lines() if not line.endswith((_MISSING, _UNEXPECTED))]
        return LoadReport(tuple(loaded), missing, unexpected, shapes, dtypes, tuple(cast), (*notes, *told))
