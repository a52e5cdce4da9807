"""The keys of one channel in a key-value store that others use too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

__all__ = ["Board", "KeyValueStore", "StoreUnreachable"]

_T = TypeVar("_T")
_Asked = tuple[Callable[["KeyValueStore"], Any], Future[Any]]
_BLOCK = 1024  # keys in one message: some hundred kilobytes, and the store serves others in between


class KeyValueStore(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: Any, /) -> object:
        """Sets a value, bytes; torch's own annotation says str, and takes both."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of the keys are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a counter, which is 0 when it is not there; returns what it is then."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys that are there."""

    def delete_key(self, key: str, /) -> bool:
        """Removes a key; whether it was there."""

    def clone(self) -> KeyValueStore:
        """The same store over another connection."""


class StoreUnreachable(Exception):
    """The store does not answer: the process that holds it has ended or is frozen, or the network to it is gone."""


class Board:
    """Keys below ``tierload/<name>/``, over a connection of their own that is made when it is first needed.

    Threads may share it. No call waits for a key: what waits asks again, since a wait inside the store is not ended by
    Ctrl-C, and TCPStore writes two lines to stderr whenever one runs out. A thread of the board's own speaks to the
    store: when the process that holds it is frozen, or its machine gone, torch waits for ever for the answer.
    """

    def __init__(self, store: KeyValueStore, name: str, limit_seconds: float) -> None:
        self._store = store
        self._limit = limit_seconds
        self._prefix = f"tierload/{quote(name, safe='')}/"  # no name is the beginning of another's keys
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def __del__(self) -> None:
        self._asked.put(None)

    def write(self, key: str, value: bytes) -> None:
        """Sets a value."""
        self._call(lambda store: store.set(self._prefix + key, value))

    def add(self, key: str, amount: int) -> int:
        """The counter's new value; a counter that is not there is 0."""
        return self._call(lambda store: store.add(self._prefix + key, amount))

    def get(self, key: str) -> bytes | None:
        """The value, or None when the key is not there."""
        full = self._prefix + key
        return self._call(lambda store: store.get(full) if store.check([full]) else None)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are known to be there."""
        full = [self._prefix + key for key in keys]
        blocks = [full[start : start + _BLOCK] for start in range(0, len(full), _BLOCK)]
        return [value for block in blocks for value in self._call(partial(_values, block))]

    def present(self, keys: Sequence[str]) -> set[str]:
        """Those of the keys that are there: by halves, since a store says of many keys only whether all are."""
        found: set[str] = set()
        ranges = [keys[start : start + _BLOCK] for start in range(0, len(keys), _BLOCK)]
        while ranges:
            part = ranges.pop()
            if self._call(partial(_all_there, [self._prefix + key for key in part])):
                found.update(part)
            elif len(part) > 1:
                ranges += [part[: len(part) // 2], part[len(part) // 2 :]]
        return found

    def delete(self, *keys: str) -> None:
        """Removes keys, whether or not they are there."""
        for key in keys:
            self._call(partial(_delete, self._prefix + key))

    def _call(self, operation: Callable[[KeyValueStore], _T]) -> _T:
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(
                    target=_speak, args=(self._store, self._asked), name="tierload-key-value-store", daemon=True
                ).start()
        answer: Future[_T] = Future()
        self._asked.put((operation, answer))
        try:
            # In two parts: where this process itself was suspended the first has run out, and the answer comes at once.
            wait((answer,), self._limit / 2)
            return answer.result(self._limit / 2)
        except TimeoutError:
            raise StoreUnreachable(f"nothing came from it for {self._limit:g} s") from None
        except RuntimeError as error:  # all of torch's stores raise it, or something below it
            raise StoreUnreachable(str(error).partition("\n")[0]) from error


def _speak(store: KeyValueStore, asked: SimpleQueue[_Asked | None]) -> None:
    """Does what is asked for, in its order, over a connection of its own, until there is no board any more."""
    own: KeyValueStore | None = None
    while (one := asked.get()) is not None:
        operation, answer = one
        try:
            own = own or store.clone()
            answer.set_result(operation(own))
        except RuntimeError as error:
            answer.set_exception(error)
        del one, operation, answer  # the next question may be long in coming


def _values(keys: list[str], store: KeyValueStore) -> list[bytes]:
    return store.multi_get(keys)


def _all_there(keys: list[str], store: KeyValueStore) -> bool:
    return store.check(keys)


def _delete(key: str, store: KeyValueStore) -> bool:
    return store.delete_key(key)
