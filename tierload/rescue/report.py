"""What a reader says of a store: two errors, and the report of what was found on the way."""

from __future__ import annotations

from dataclasses import dataclass, field


class Damage(ValueError):
    """Bytes that are not what the format says."""


class Refused(Exception):
    """No store, no such commit, or a store that a reader of format 1 must not read."""


@dataclass
class Report:
    """What was found on the way: `problems` cost data or may have, `notes` did not."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, asked: Report | None) -> None:
        """Raise what was found when the caller did not ask for a report of it."""
        if asked is None and self.problems:
            raise Damage("\n".join(self.problems))
