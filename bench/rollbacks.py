"""Rolls a store back and forth between two commits, and prints when each rollback began and ended."""

from __future__ import annotations

import json
import sys
import time

import tierload


def main() -> None:
    path, rounds, *targets = sys.argv[1:]
    times = []
    with tierload.Store(path, mode="w") as store:
        for number in range(int(rounds) + 1):
            start = time.time()
            store.rollback(targets[number % 2])
            times.append((start, time.time()))
    print(json.dumps(times[1:]))


if __name__ == "__main__":
    main()
