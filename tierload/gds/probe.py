"""How fast kvikio is between a file system and a GPU, tried in a process of its own: with a driver that is missing or
sick it can hang or crash, and then that is the answer."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from tierload.errors import StoreIOError
from tierload.gds.availability import absence, first_line, loaded, refusal, version
from tierload.gds.choice import ProbeResult
from tierload.gds.device import DeviceMemory
from tierload.gds.files import Extent, GdsFiles

__all__ = ["probe"]

_BLOCK = 4 << 20
_KILL_SECONDS = 5.0  # a process that waits for a driver inside the kernel may not even be killed


def probe(
    folder: str | os.PathLike[str], *, device: int = 0, timeout_s: float = 20, nbytes: int = 256 << 20
) -> ProbeResult:
    """Writes and reads ``nbytes`` between a GPU and a temporary file in ``folder``, in another process, and removes it.

    Whatever goes wrong there, or takes longer than ``timeout_s``, is a result without rates that says so.
    """
    try:
        scratch = tempfile.mkdtemp(prefix=".tierload-gds-", dir=folder)
    except OSError as error:
        return ProbeResult(why=f"nothing can be written in {os.fspath(folder)}: {error.strerror}", again=True)
    try:
        return _child(_command(scratch, device, nbytes), timeout_s)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _command(scratch: str, device: int, nbytes: int) -> list[str]:
    return [sys.executable, "-P", "-m", "tierload.gds.probe", scratch, str(device), str(nbytes)]


def _child(command: list[str], timeout_s: float) -> ProbeResult:
    """What a command prints about itself, or what has become of it."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)  # it finds what this process finds
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": paths},
        )
    except OSError as error:
        return ProbeResult(why=f"the probe of kvikio could not be started: {first_line(error)}", again=True)
    try:
        out, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return ProbeResult(why=f"kvikio did not answer within {timeout_s:g} s")
    finally:
        _end(child)
    if child.returncode:
        return ProbeResult(why=f"the probe of kvikio ended with {_end_of(child.returncode)}{_last(errors)}")
    try:
        found = ProbeResult.of(json.loads(out.splitlines()[-1]))
    except (ValueError, IndexError):
        found = None
    return found or ProbeResult(why=f"the probe of kvikio gave no result{_last(out)}")


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_SECONDS)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _end_of(code: int) -> str:
    return f"status {code}" if code > 0 else (signal.strsignal(-code) or f"signal {-code}").lower()


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""


def main(scratch: str, device: int, nbytes: int) -> None:
    """The other process: measures, and prints the result as a line of JSON."""
    try:
        found = _measured(Path(scratch), device, nbytes)
    except StoreIOError as error:  # a file system that cuFile refuses stays one; a full one may not
        why = str(error.strerror).partition(";")[0]
        found = ProbeResult(why=why, kvikio=version(), again=error.errno in (errno.ENOSPC, errno.EDQUOT))
    except Exception as error:  # noqa: BLE001 - of CUDA, kvikio or the disk: it is a reason, and is shown
        found = ProbeResult(why=first_line(error), kvikio=version(), again=True)
    print(json.dumps(asdict(found)), flush=True)


def _measured(folder: Path, device: int, nbytes: int) -> ProbeResult:
    why = absence()
    kvikio, _ = loaded()
    if why or kvikio is None:
        return ProbeResult(why=why)
    why = refusal()
    nothing = ProbeResult(why=why, kvikio=version())
    if not why:
        nothing = replace(nothing, cufile=".".join(map(str, kvikio.cufile_driver.libcufile_version())))
        if not kvikio.cufile_driver.get("is_gds_available"):
            return replace(nothing, why="cuFile finds no nvidia-fs")
    with DeviceMemory(device, nbytes) as memory, GdsFiles() as files:
        whole = [Extent(0, memory.pointer, nbytes)]
        for at, block in _blocks(nbytes):
            memory.fill(block, at)
        _write(files, folder / "first", whole)
        files.read(folder / "first", whole)  # threads, pinned memory and cuFile's driver are there now
        write = _write(files, folder / "second", whole)
        for at, block in _blocks(nbytes):
            memory.fill(bytes(len(block)), at)
        start = time.perf_counter()
        files.read(folder / "second", whole)
        read = time.perf_counter() - start
        if any(memory.bytes_at(at, len(block)) != block for at, block in _blocks(nbytes)):
            return replace(nothing, why="kvikio gave back other bytes than were written")
    return replace(nothing, mode="compat" if why else "gds", write=nbytes / write, read=nbytes / read)


def _blocks(nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Where blocks lie, and their bytes: alike but for the place, which each begins with."""
    for at in range(0, nbytes, _BLOCK):
        yield at, (at.to_bytes(8, "little") + _noise())[: min(_BLOCK, nbytes - at)]


@cache
def _noise() -> bytes:
    return random.Random(0).randbytes(_BLOCK)  # no device and no file system makes it smaller


def _write(files: GdsFiles, path: Path, extents: list[Extent]) -> float:
    """Seconds until a new file is durable. It has its blocks beforehand, as a segment does, and is not in the page
    cache afterwards."""
    nbytes = extents[-1].end
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError:
            file.truncate(nbytes)  # a file system that knows no such thing; one that is full says so again
        start = time.perf_counter()
        files.write(path, extents)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return seconds


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
