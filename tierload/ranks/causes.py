"""An error as text that another rank can raise: JSON, and no class that is not one of ``tierload.errors``."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, field

from tierload import errors
from tierload.errors import RankFailed, RankLost, RanksDisagree, TierloadError

__all__ = ["Cause", "add_later", "raised"]

_TRACEBACK = 4000  # characters of another rank's: its last calls
# These are about several ranks; who noticed is of no interest.
_OF_ALL = (RankLost, RanksDisagree)


@dataclass(frozen=True)
class Cause:
    """An error and the rank that it happened on; ``attributes`` are those of the error that JSON can hold."""

    rank: int
    who: str  # "rank 2 (host, process 4711)"
    kind: str
    message: str
    number: int | None = None
    filename: str | None = None
    attributes: dict[str, object] = field(default_factory=dict)
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int, who: str) -> Cause:
        """Describes an error of this rank."""
        known = isinstance(error, TierloadError)
        number = error.errno if isinstance(error, OSError) else None
        filename = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else None
        message = str(error.strerror) if isinstance(error, OSError) and number is not None else str(error)
        attributes = (
            {key: _plain(value) for key, value in vars(error).items() if not key.startswith("_")} if known else {}
        )
        text = "" if known else "".join(traceback.format_exception(error))[-_TRACEBACK:]
        return cls(rank, who, type(error).__name__, message, number, filename, attributes, text)

    def to_json(self) -> dict[str, object]:
        """What ``Cause(**...)`` makes it from again."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.who}: {self.kind}: {self.message}"


def raised(cause: Cause) -> TierloadError:
    """The error to raise on another rank than the one that it happened on."""
    kind = getattr(errors, cause.kind, None) if cause.kind in errors.__all__ else None
    if kind is None:
        failed = RankFailed(str(cause))
        if cause.traceback:
            failed.add_note(f"on {cause.who}:\n{cause.traceback}")
        return failed
    message = cause.message if issubclass(kind, _OF_ALL) else f"{cause.who}: {cause.message}"
    # Not through the class's own __init__: what that would add to the message is already there.
    error: TierloadError = kind.__new__(kind)
    error.args = (message,) if cause.number is None else (cause.number, message)
    if isinstance(error, OSError) and cause.number is not None:
        error.errno, error.strerror, error.filename = cause.number, message, cause.filename
    for key, value in cause.attributes.items():
        setattr(error, key, tuple(value) if isinstance(value, list) else value)
    return error


def add_later(error: BaseException, later: list[Cause]) -> None:
    """Notes what else went wrong after the first cause."""
    for cause in later:
        error.add_note(f"later, on {cause}")


def _plain(value: object) -> object:
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return repr(value)
