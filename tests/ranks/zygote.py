"""A process that has imported all that ranks need and forks them: importing torch takes longer than the tests do.

It answers a request with the process numbers of the ranks, and then, for each that ends, its rank and status. What a
rank returned or raised lies in a file.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor

import tierload.api  # noqa: F401 ranks use it

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Request:
    """Ranks that call a function of a module, found by its names; ``store`` is "tcp" (rank 0 holds it) or "file"."""

    ranks: int
    module: str
    function: str
    arguments: tuple[Any, ...]
    folder: str
    store: str


def serve(asked: Connection) -> None:
    """Until there are no more requests."""
    while True:
        try:
            request: Request = asked.recv()
        except EOFError:
            return
        pids = [_fork(request, rank, pipe) for pipe in [os.pipe()] for rank in range(request.ranks)]
        asked.send(pids)
        for _ in pids:
            pid, status = os.wait()
            asked.send((pids.index(pid), os.waitstatus_to_exitcode(status)))


def _fork(request: Request, rank: int, others: tuple[int, int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _be(request, rank, others)
        finally:
            os._exit(99)
    if rank == request.ranks - 1:
        for end in others:
            os.close(end)
    return pid


def _be(request: Request, rank: int, others: tuple[int, int]) -> None:
    """Is one rank, to its end."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    folder = Path(request.folder)
    log = os.open(folder / f"stderr.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2)
    outcome: tuple[str, Any]
    try:
        dist.init_process_group("gloo", store=_store(request, rank, folder), rank=rank, world_size=request.ranks)
        function = getattr(importlib.import_module(request.module), request.function)
        outcome = "result", function(rank, request.ranks, *request.arguments)
    except BaseException as error:  # noqa: BLE001 it is handed to the test
        text = "".join(traceback.format_exception(error))
        error.add_note(text)  # a pickle has no traceback
        sys.stderr.write(text)
        outcome = "exception", error
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 whatever stands in the way of a pickle
        data = pickle.dumps(("exception", RuntimeError(f"cannot be pickled: {outcome!r}")))
    (folder / f"outcome.{rank}").write_bytes(data)
    # Rank 0 holds the store: it ends when nobody else has the pipe.
    os.close(others[1])
    if rank == 0:
        os.read(others[0], 1)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(0)


def _store(request: Request, rank: int, folder: Path) -> dist.Store:
    if request.store == "file":
        return dist.FileStore(str(folder / "store"), request.ranks)
    port = folder / "port"
    limit = timedelta(seconds=60)
    if rank == 0:
        held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        port.with_suffix(".new").write_text(str(held.port))
        port.with_suffix(".new").rename(port)
        return held
    while not port.exists():
        time.sleep(0.002)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, timeout=limit)


def main() -> None:
    """Serves whoever started it and gave it the end of a pipe."""
    torch.set_num_threads(1)  # threads do not survive a fork
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    serve(Connection(int(sys.argv[1])))
