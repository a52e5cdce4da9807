"""Rounds: every rank hands something in, rank 0 decides, every rank gets the answer or the same error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tierload.errors import RankLost, RanksDisagree
from tierload.ranks.board import Board, KeyValueStore, StoreUnreachable
from tierload.ranks.causes import Cause, add_later, raised
from tierload.ranks.ledger import Answer, Ledger, State
from tierload.ranks.life import Heart, Position
from tierload.ranks.watch import Call, Watch

__all__ = ["Channel"]

_SHOWN = 10


class Channel:
    """Messages between the ranks of one job that save into one store, or load from it.

    Every rank makes the same calls in the same order, ``begin`` first of all in every save, from one thread at a time
    (``alive`` and ``working`` from any). After an error every rank may go on: the next call is another round.

    Args:
        store: torch's key-value store (TCPStore, FileStore, HashStore, PrefixStore), as every rank has it. The
            channel clones it when it is first used, so it never holds the training's connection.
        rank: this rank, from 0.
        ranks: how many there are.
        name: tells the channels of one key-value store apart; equal on all ranks.
        limit_seconds: so long may a rank be without a sign of life while others wait for it.
        members: what the ranks are called in errors, where they are only some of the job's.
        call: what all of them have to call, for messages.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        ranks: int,
        *,
        name: str,
        limit_seconds: float,
        members: Sequence[int] | None = None,
        call: Call = "save",
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.members: Sequence[int] = range(ranks) if members is None else members
        self._call = call
        look_every = min(1.0, limit_seconds / 8)
        self._limit = limit_seconds
        self._board = Board(store, name, limit_seconds)
        self._ledger = Ledger(self._board, rank, ranks)
        self._heart = Heart(self._board, rank, look_every)
        others = range(1, ranks) if rank == 0 else (0,)
        self._watch = Watch(self._board, others, limit_seconds, self.members, call)
        # Waiting ranks ask again and again. The store answers some 40,000 questions a second on one core; a quarter of
        # that is the most that they ask for in a long wait, however many they are.
        self._pause = (0.0005 + ranks * 2.5e-5, max(0.01, ranks * 1e-4))
        self._look_every = max(look_every, self._pause[1])

    def begin(self) -> None:
        """A save begins: whatever became of the one before, on this rank or another, its rounds are over.

        Raises:
            RankLost: the key-value store does not answer.
        """
        self._ledger.next_save()
        try:
            self._come_to(self._call)
        except StoreUnreachable as error:
            raise self._unreachable(self._call, error) from error

    def round(self, what: str, contribution: bytes | BaseException, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """All ranks hand in bytes, or the error that kept them from it, and get rank 0's answer.

        Args:
            what: the round's name, for messages; the same on all ranks.
            contribution: this rank's part.
            decide: called on rank 0 only, with the parts by rank, and only when all ranks have handed in bytes.

        Returns:
            What ``decide`` returned.

        Raises:
            TierloadError: on every rank the first failure of any, be it of ``decide``; later ones are its notes. Where
                it happened it is the error itself. Others get one of the same class that names the rank, or
                RankFailed where it was not one of tierload's.
            RankLost: a rank has ended, or gave no sign of life within the limit.
        """
        failed = True
        try:
            at = self._come_to(what)
            if isinstance(contribution, StoreUnreachable):  # noticed between two rounds
                contribution = self._unreachable(what, contribution)
            own = contribution if isinstance(contribution, BaseException) else None
            part = b"" if isinstance(contribution, BaseException) else contribution
            answer, own = (
                self._lead(at, what, part, own, decide) if self.rank == 0 else self._follow(at, what, part, own)
            )
            if answer.causes:
                raise self._error(answer.causes, own)
            failed = False
            return answer.data
        except StoreUnreachable as error:
            raise self._unreachable(what, error) from error
        finally:
            self._ledger.next_round(failed=failed)

    def post(self, what: str, data: bytes) -> None:
        """Rank 0 says something without asking: the n-th ``post`` of a save is what the n-th ``read`` returns.

        Raises:
            RankLost: the key-value store does not answer.
        """
        try:
            self._come_to(what)
            self._ledger.post(data)
        except StoreUnreachable as error:
            raise self._unreachable(what, error) from error
        finally:
            self._ledger.next_post()

    def read(self, what: str) -> bytes:
        """What rank 0 posted.

        Raises:
            TierloadError: rank 0 failed in the round that follows instead, or is lost, as from ``round``.
        """
        answer = None
        try:
            answer = self._await_answer(self._ledger.post_key, self._come_to(what), what)
            if answer.causes:
                self._ledger.have_read()
                raise self._error(answer.causes, None)
            return answer.data
        except StoreUnreachable as error:
            raise self._unreachable(what, error) from error
        finally:
            if answer is None or answer.causes:
                self._ledger.next_round(failed=True)
            else:
                self._ledger.next_post()

    def alive(self, moved: int) -> None:
        """This rank works: ``moved`` bytes so far. Cheap enough for every buffer; told about once a second."""
        try:
            self._heart.beat(moved=moved)
        except StoreUnreachable:
            return  # the next round says it

    def working(self, what: str, progress: Callable[[], int]) -> AbstractContextManager[None]:
        """After ``begin``: while the block runs, the others are told whenever ``progress()`` (bytes) has changed."""
        return self._heart.beating(what, progress)

    def close(self) -> None:
        """Before a process ends: rank 0 waits until all have read its last answer, at most some seconds.

        As a rule its process holds the key-value store, so an answer that was not read is lost with it.
        """
        if self._ledger.await_readers(self._pause[0]):
            self._ledger.clear()

    # ---- rank 0 ----------------------------------------------------------------------------------------------------
    def _lead(
        self, at: Position, what: str, part: bytes, own: BaseException | None, decide: Callable[[list[bytes]], bytes]
    ) -> tuple[Answer, BaseException | None]:
        """Makes the answer and tells the others; also what failed on this rank, if anything did."""
        closed: State | None = None
        data = b""
        if own is None:
            try:
                self._await_parts(at, what)
                closed = self._ledger.close()
                if closed.failures == 0:
                    data = decide(self._parts(at, what, part))
            except StoreUnreachable as error:
                own = self._unreachable(what, error)
                own.__cause__ = error
            except BaseException as error:  # noqa: BLE001 it is raised when the others know it
                own = error
        number = 1  # of the failure on this rank: what comes after the closing is the only one
        if closed is None:
            number = self._ledger.count_failure().failures
            closed = self._ledger.close()
        answer = Answer(data, self._causes(closed.failures, number, own))
        self._ledger.answer(answer, closed.failures)
        return answer, own

    def _await_parts(self, at: Position, what: str) -> None:
        """Until all have handed in their parts or any has failed."""
        self._watch.begin()
        began = now = time.monotonic()
        look = began + self._look_every
        while True:
            before, now = now, time.monotonic()
            if now - before > self._limit:  # the others have given up meanwhile, or are about to
                first = self.members[0]
                why = f"rank {first} itself stood still for {now - before:.3g} s; was it suspended?"
                raise RankLost(f"the ranks did not agree on {what!r}: {why}", ranks=[first])
            state = self._ledger.state()
            if state.parts == self.ranks - 1 or state.failures:
                return
            if now >= look:
                look = now + self._look_every
                self._heart.beat()
                lost = self._watch.look(at, what, for_arrival=True)
                if lost is not None and self._ledger.state() == state:
                    raise lost
            self._sleep(now - began)

    def _parts(self, at: Position, what: str, own: bytes) -> list[bytes]:
        """The parts of all ranks, which are there."""
        head = _head(at, what)
        raws = self._board.get_all([f"part/{rank}" for rank in range(1, self.ranks)])
        others = [
            (self.members[rank], raw.partition(b"\n")[0].decode())
            for rank, raw in enumerate(raws, 1)
            if not raw.startswith(head)
        ]
        place = _head(at, "").decode().rstrip("\n")
        gone = [rank for rank, line in others if not line.startswith(place)]
        if gone:
            raise RankLost(f"the ranks did not agree on {what!r}: ranks {gone[:_SHOWN]} have gone on", ranks=gone)
        if others:
            raise RanksDisagree(
                f"the ranks are not at the same place in their {self._call}s, rank {self.members[0]} is at {what!r}",
                differences=[f"rank {rank} is at {line.removeprefix(place)!r}" for rank, line in others],
            )
        return [own, *(raw[len(head) :] for raw in raws)]

    def _causes(self, count: int, number: int, own: BaseException | None) -> list[Cause]:
        """The failures that count, in the order in which they happened; ``number`` is that of this rank's own."""
        causes: list[Cause] = []
        for n in range(1, max(count, number if own else 0) + 1):
            cause = self._cause(own) if own is not None and n == number else self._ledger.failure(n)
            if cause is not None:
                causes.append(cause)
        if count and not causes:
            causes.append(self._cause(RankLost("a rank failed and ended before it could say why; its own output does")))
        return causes

    # ---- the others ------------------------------------------------------------------------------------------------
    def _follow(
        self, at: Position, what: str, part: bytes, own: BaseException | None
    ) -> tuple[Answer, BaseException | None]:
        if own is not None:
            self._ledger.report(self._cause(own))
        else:
            self._board.write(f"part/{self.rank}", _head(at, what) + part)
            self._ledger.count_part()
            # Not before it is counted: of one that is killed in between, everyone would believe that it is there.
            self._heart.at(at, what, arrived=True)
        answer = self._await_answer(self._ledger.answer_key, at, what)
        self._ledger.have_read()
        return answer, own

    def _await_answer(self, key: str, at: Position, what: str) -> Answer:
        """Until rank 0 has written the key. Who gives up fails the round, if it is not closed yet."""
        self._watch.begin()
        began = time.monotonic()
        look = began + self._look_every
        try:
            while (text := self._board.get(key)) is None:
                now = time.monotonic()
                if now >= look:
                    look = now + self._look_every
                    lost = self._watch.look(at, what, for_arrival=False)
                    if lost is not None and self._board.get(key) is None:
                        raise lost
                self._sleep(now - began)
        except StoreUnreachable:
            raise
        except BaseException as error:
            if self._watch.has_gone_on(0, at):  # nobody looks at this round any more
                self._ledger.forget()
            elif self._ledger.report(self._cause(error)).closed:
                error.add_note(f"rank 0 was deciding on {what!r} just then: look at the store for what came of it")
            raise
        return Answer.from_bytes(text)

    # ---- both ------------------------------------------------------------------------------------------------------
    def _come_to(self, what: str) -> Position:
        at = self._ledger.at
        self._heart.at(at, what)
        return at

    def _cause(self, error: BaseException) -> Cause:
        own = self.members[self.rank]
        return Cause.of(error, own, self._heart.life.who(own))

    def _error(self, causes: Sequence[Cause], own: BaseException | None) -> BaseException:
        """What this rank raises: its own error when that was the first, or is no failure but the wish to end."""
        first, *later = causes
        number = self.members[self.rank]
        if own is not None and first.rank == number:
            error = own
        elif own is not None and not isinstance(own, Exception):
            error = own
            error.add_note(f"the ranks had failed already, on {first}")
        else:
            error = raised(first)
            if own is not None and all(cause.rank != number for cause in later):
                later.append(self._cause(own))
        add_later(error, later)
        return error

    def _sleep(self, waited: float) -> None:
        """Between two questions: an eighth of what was waited so far, within limits."""
        shortest, longest = self._pause
        time.sleep(min(max(shortest, waited / 8), longest))

    def _unreachable(self, what: str, error: StoreUnreachable) -> RankLost:
        here = self.members[self.rank] == 0
        first = self._watch.who(0) if self.members[0] == 0 else "rank 0"
        holder = "" if here else f", mostly {first},"
        return RankLost(
            f"the ranks did not agree on {what!r}, or this one does not know it: torch's key-value store, which they "
            f"speak over, does not answer ({error}): the process that holds it{holder} has ended or is frozen; its own "
            "output says why; start the job again, it continues from the newest commit",
            ranks=() if here else (0,),
        )


def _head(at: Position, what: str) -> bytes:
    return f"{at[0]}.{at[1]}.{at[2]} {what}\n".encode()
