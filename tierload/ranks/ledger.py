"""Where a channel is in the order of its calls, and what the keys there say.

The keys of a round (its position is written ``1.2.3``), next to ``part/<rank>``, ``life/<rank>`` and ``born/<rank>``,
which stay:

* ``state/<position>``: one counter, so that what came before what is never in doubt: how many ranks have handed in
  their parts, how many have failed, and whether rank 0 has closed the round. A failure that was counted before that
  makes the round fail; one that comes later is too late to.
* ``failed/<position>/<n>``: the n-th failure.
* ``answer/<position>``: what rank 0 made of it; ``read/<position>``: how many have read that.
* ``post/<position>``: what rank 0 said without asking.

Rank 0 removes them when every rank has come to a later round, or has read the last answer before it closes; then the
parts and the other ranks' lives too, which only it looks at.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tierload.ranks.board import Board, StoreUnreachable
from tierload.ranks.causes import Cause
from tierload.ranks.life import Position

__all__ = ["Answer", "Ledger", "State"]

# Fields of the counter `state`.
_PART = 1
_FAILURE = 1 << 24
_CLOSED = 1 << 48
_FIELD = (1 << 24) - 1

_GOOD, _BAD = b"+", b"-"
_KEPT = 8  # closed rounds whose keys are kept for a rank that has not come to them
# How long rank 0 waits for all to have read its last answer; after a failure some may never.
_READ_S, _READ_FAILURE_S = 10.0, 1.0
_UNSAID_S = 5.0  # between a failure's being counted and its being written there are microseconds


@dataclass(frozen=True)
class State:
    """What the counter of a round says."""

    parts: int
    failures: int
    closed: bool


@dataclass(frozen=True)
class Answer:
    """What rank 0 says: some bytes, or why there are none."""

    data: bytes
    causes: Sequence[Cause] = ()

    def to_bytes(self) -> bytes:
        """As it is written."""
        if not self.causes:
            return _GOOD + self.data
        return _BAD + json.dumps([cause.to_json() for cause in self.causes]).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Answer:
        """What ``to_bytes`` made."""
        if text[:1] == _GOOD:
            return cls(text[1:])
        return cls(b"", [Cause(**cause) for cause in json.loads(text[1:])])


class Ledger:
    """The position of one rank in the calls of all, and the keys of the round that it is in."""

    def __init__(self, board: Board, rank: int, ranks: int) -> None:
        self._board = board
        self._rank = rank
        self._ranks = ranks
        self._born = 0
        self._save = self._round = self._posts = 0
        self._old: deque[list[str]] = deque()
        self._unread: tuple[str, float] | None = None  # the counter of the last answer's readers, and how long to wait

    # ---- the position ----------------------------------------------------------------------------------------------
    @property
    def at(self) -> Position:
        """The round that this rank is in or comes to next."""
        if self._born == 0:
            self._born = self._board.add(f"born/{self._rank}", 1)
        return (self._born, self._save, self._round)

    def next_save(self) -> None:
        """Whatever became of the one before."""
        self._save += 1
        self._round = self._posts = 0

    def next_round(self, *, failed: bool) -> None:
        """The round is over; one that failed was answered to those who were in ``read``, too."""
        self._round += 1
        self._posts += failed

    def next_post(self) -> None:
        """A post was read."""
        self._posts += 1

    # ---- the keys --------------------------------------------------------------------------------------------------
    @property
    def answer_key(self) -> str:
        """Where the answer of the round will be."""
        return self._key("answer", self._round)

    @property
    def post_key(self) -> str:
        """Where the next post will be."""
        return self._key("post", self._posts)

    def state(self) -> State:
        """How far the round is."""
        return self._count(0)

    def count_part(self) -> State:
        """This rank's part is there."""
        return self._count(_PART)

    def count_failure(self) -> State:
        """Something failed; ``failures`` is then this one's number."""
        return self._count(_FAILURE)

    def close(self) -> State:
        """From now on no failure counts any more."""
        return self._count(_CLOSED)

    def report(self, cause: Cause) -> State:
        """Counts a failure and, unless the round is closed, says what it was."""
        state = self.count_failure()
        if not state.closed:
            self._board.write(self._failure_key(state.failures), json.dumps(cause.to_json()).encode())
        return state

    def failure(self, number: int) -> Cause | None:
        """The n-th failure; None when whoever counted it ended before it could say what it was."""
        key, until = self._failure_key(number), time.monotonic() + _UNSAID_S
        while (text := self._board.get(key)) is None and time.monotonic() < until:
            time.sleep(0.001)
        return None if text is None else Cause(**json.loads(text))

    def forget(self) -> None:
        """Removes what a rank wrote that came to a round when all was over."""
        self._board.delete(self._key("state", self._round))

    def post(self, data: bytes) -> None:
        """Rank 0 says something without asking."""
        self._board.write(self.post_key, Answer(data).to_bytes())
        self._old.append([self.post_key])

    def answer(self, answer: Answer, failures: int) -> None:
        """Rank 0 tells the others, and removes what none of them needs any more."""
        text = answer.to_bytes()
        read = self._key("read", self._round)
        keys = [self._key("state", self._round), self.answer_key, read]
        keys += [self._failure_key(number) for number in range(1, failures + 1)]
        if answer.causes:  # some may still be in `read`
            self._board.write(self.post_key, text)
            keys.append(self.post_key)
        self._board.write(self.answer_key, text)
        while self._old and (not answer.causes or len(self._old) > _KEPT):
            self._board.delete(*self._old.popleft())
        self._old.append(keys)
        self._unread = read, _READ_FAILURE_S if answer.causes else _READ_S

    def have_read(self) -> None:
        """This rank has the answer."""
        with suppress(StoreUnreachable):  # rank 0 had no need to wait for this one
            self._board.add(self._key("read", self._round), 1)

    def await_readers(self, pause: float) -> bool:
        """Waits until all have read the last answer, at most some seconds; whether they have."""
        if self._unread is None:
            return False
        (counter, seconds), self._unread = self._unread, None
        until = time.monotonic() + seconds
        with suppress(StoreUnreachable):  # then nobody can read it any more
            while (read := self._board.add(counter, 0)) < self._ranks - 1 and time.monotonic() < until:
                time.sleep(pause)
            return read == self._ranks - 1
        return False

    def clear(self) -> None:
        """Rank 0 removes what only it would still look at: a job may open thousands of channels one by one."""
        with suppress(StoreUnreachable):
            while self._old:
                self._board.delete(*self._old.popleft())
            for rank in range(1, self._ranks):
                self._board.delete(f"part/{rank}", f"life/{rank}")

    def _count(self, amount: int) -> State:
        counted = self._board.add(self._key("state", self._round), amount)
        return State(counted & _FIELD, (counted >> 24) & _FIELD, counted >= _CLOSED)

    def _key(self, kind: str, number: int) -> str:
        return f"{kind}/{self._born}.{self._save}.{number}"

    def _failure_key(self, number: int) -> str:
        return f"{self._key('failed', self._round)}/{number}"
