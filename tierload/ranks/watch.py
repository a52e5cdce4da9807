"""Who is missing from a round, for how long nothing was heard of them, and what to say about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tierload.errors import RankLost
from tierload.ranks.board import Board
from tierload.ranks.life import Life, Position

__all__ = ["Call", "Watch"]

Call = Literal["save", "load"]

_WARN_AFTER_S = 10.0
_SHOWN = 10

_BY_ONE: dict[Call, str] = {
    "save": 'Settings(ranks="one") for a save by one rank alone',
    "load": "together=False for a load by one rank alone",
}

_logger = logging.getLogger("tierload")


@dataclass
class _Seen:
    raw: bytes
    life: Life
    since: float


class Watch:
    """Looks at ranks while one waits for them. A limit counts from a rank's last sign of life, on this clock only."""

    def __init__(
        self, board: Board, ranks: Iterable[int], limit_seconds: float, members: Sequence[int], call: Call
    ) -> None:
        self._board = board
        self._members = members  # what the ranks are called
        self._call = call
        self._limit = limit_seconds
        self._unheard = set(ranks)
        self._seen: dict[int, _Seen] = {}
        self._warned = True
        self._began = 0.0

    def begin(self) -> None:
        """A wait begins: whoever was silent before it has the whole limit from now on."""
        self._began = time.monotonic()
        self._warned = False

    def who(self, rank: int) -> str:
        """How messages name it, as far as it is known."""
        number = self._members[rank]
        return self._seen[rank].life.who(number) if rank in self._seen else f"rank {number}"

    def has_gone_on(self, rank: int, at: Position) -> bool:
        """Whether it is known to be in a later round."""
        return rank in self._seen and self._seen[rank].life.at > at

    def look(self, at: Position, what: str, *, for_arrival: bool) -> RankLost | None:
        """Asks after all; an error when some of those who are not there are lost.

        With ``for_arrival`` those are waited for who have not handed in their part of the round; without it all are.
        """
        now = time.monotonic()
        self._listen(at, now)
        lost: dict[int, str] = {}
        quiet: list[int] = []
        for rank, seen in self._seen.items():
            if for_arrival and seen.life.arrived and seen.life.at == at:
                continue
            silent = now - max(seen.since, self._began)
            if seen.life.at[0] > at[0]:
                lost[rank] = "has been started again by itself"
            elif seen.life.at > at:
                lost[rank] = f"has gone on to {seen.life.what!r}"
            elif seen.life.has_ended():
                lost[rank] = f"has ended; the last that it did was {seen.life.doing()}"
            elif silent > self._limit:
                lost[rank] = (
                    f"has given no sign of life for {silent:.3g} s; the last that it did was {seen.life.doing()}"
                )
            elif silent > _WARN_AFTER_S:
                quiet.append(rank)
        silent = now - self._began
        if self._unheard and silent > self._limit:
            lost |= dict.fromkeys(self._unheard, f"has not called {self._call} for {silent:.3g} s")
        elif self._unheard and silent > _WARN_AFTER_S:
            quiet += self._unheard
        if lost:
            return self._lost(lost, what)
        if quiet and not self._warned:
            self._warned = True
            _logger.warning("waiting for ranks in %r since %.0f s: %s", what, silent, self._listed(sorted(quiet)))
        return None

    def _listen(self, at: Position, now: float) -> None:
        keys = {f"life/{rank}": rank for rank in self._unheard}
        there = sorted(self._board.present(list(keys)))
        for key, raw in zip(there, self._board.get_all(there), strict=True):
            life = Life.from_json(raw)
            if life.at[0] >= at[0]:  # otherwise it is of an earlier channel of this name, and maybe of another process
                self._unheard.discard(keys[key])
                self._seen[keys[key]] = _Seen(raw, life, now)
        raws = self._board.get_all([f"life/{rank}" for rank in self._seen])
        for (rank, seen), raw in zip(self._seen.items(), raws, strict=True):
            if raw != seen.raw:
                self._seen[rank] = _Seen(raw, Life.from_json(raw), now)

    def _lost(self, lost: dict[int, str], what: str) -> RankLost:
        shown = sorted(lost)[:_SHOWN]
        text = "; ".join(f"{self.who(rank)} {lost[rank]}" for rank in shown)
        if len(lost) > len(shown):
            text += f"; and {len(lost) - len(shown)} more"
        if self._unheard & lost.keys():
            text += f"; every rank of the job has to call {self._call} (or {_BY_ONE[self._call]})"
        elif any("ended" in why for why in lost.values()):
            text += "; its own output says why; start the job again, it continues from the newest commit"
        else:
            text += "; look at its output and at where it stands (py-spy dump)"
            text += f"; {self._call} again when all ranks are there"
        ranks = [self._members[rank] for rank in sorted(lost)]
        return RankLost(f"the ranks did not agree on {what!r}: {text}", ranks=ranks)

    def _listed(self, ranks: list[int]) -> str:
        text = ", ".join(self.who(rank) for rank in ranks[:_SHOWN])
        return text + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
