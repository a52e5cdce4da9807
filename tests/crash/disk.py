"""A throw-away block device with a file system on it, whose power can be cut: zram, or a loop device on a tmpfs file.

Power is cut by the shutdown ioctl of ext4 and XFS: nothing that is in memory is written any more, not even the file
system's own log. A later mount finds what the device had been given, and replays the log.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

ZRAM = Path("/sys/class/zram-control")
DISK_BYTES = 400 << 20  # XFS wants 300 MB at least; zram and tmpfs take only what is written
MKFS = {  # zram has blocks of 4 KiB
    "ext4": ["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-s", "size=4096"],
}
SHUTDOWN = 0x8004587D  # _IOR('X', 125, u32)
WITHOUT_LOG_FLUSH = 2
MS_REC_PRIVATE = 0x4000 | 0x40000
CLONE_NEWNS = 0x20000

libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """This machine cannot do it; the message says what is missing."""


def called(result: int, what: str) -> None:
    """Raises what the C library reported."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def hide_mounts() -> None:
    """Gives this process mounts of its own, so that they end with it whatever happens to it."""
    if libc.unshare(CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None)


class Device:
    """A block device in memory; `name` says which kind."""

    def __init__(self) -> None:
        self.number = ""
        self.backing: Path | None = None
        try:
            self._zram()
        except OSError as why:
            self.close()
            try:
                self._loop()
            except (OSError, subprocess.CalledProcessError) as also:
                self.close()
                raise Unavailable(f"neither zram ({why}) nor a loop device ({also}) can be had") from None

    def _zram(self) -> None:
        self.number = (ZRAM / "hot_add").read_text().strip()
        Path(f"/sys/block/zram{self.number}/disksize").write_text(str(DISK_BYTES))
        self.path, self.name = f"/dev/zram{self.number}", "zram"

    def _loop(self) -> None:
        shm = Path("/dev/shm")
        with tempfile.NamedTemporaryFile(dir=shm if shm.is_dir() else None, prefix="tierload-", delete=False) as file:
            file.truncate(DISK_BYTES)
        self.backing = Path(file.name)
        command = ["losetup", "--find", "--show", file.name]
        self.path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        self.name = "loop on tmpfs" if shm.is_dir() else "loop"

    def close(self) -> None:
        """Gives the device back."""
        if self.number:
            patiently(lambda: Path(f"/sys/block/zram{self.number}/reset").write_text("1"))
            patiently(lambda: (ZRAM / "hot_remove").write_text(self.number))
            self.number = ""
        if self.backing:
            if hasattr(self, "path"):
                subprocess.run(["losetup", "--detach", self.path], check=False)
            self.backing.unlink()
            self.backing = None


def patiently(action) -> None:
    """Repeats what fails with EBUSY for a while: udev and others look into new and dying devices."""
    for attempt in range(50):
        try:
            action()
        except OSError as error:
            if error.errno != errno.EBUSY or attempt == 49:
                raise
            time.sleep(0.1)
        else:
            return


class Disk:
    """A mounted file system on a device of its own. Leaving the context gives everything back."""

    def __init__(self, kind: str) -> None:
        if os.geteuid() != 0:
            raise Unavailable("needs root: a block device has to be made and mounted")
        if not shutil.which(MKFS[kind][0]):
            raise Unavailable(f"{MKFS[kind][0]} is not installed")
        hide_mounts()
        self.kind = kind
        self.mounted = False
        self.directory = Path(tempfile.mkdtemp(prefix="tierload-cut-"))
        try:
            self.device = Device()
        except BaseException:
            self.directory.rmdir()
            raise
        self.name = f"{kind} on {self.device.name}"
        try:
            subprocess.run([*MKFS[kind], self.device.path], check=True, capture_output=True, text=True)
            self.mount()
            self._probe()
        except subprocess.CalledProcessError as error:
            self.close()
            raise Unavailable(f"{kind} cannot be made: {error.stderr.strip()}") from None
        except OSError as error:
            self.close()
            raise Unavailable(f"{kind} cannot be mounted or shut down: {error}") from None
        except BaseException:
            self.close()
            raise

    def _probe(self) -> None:
        """A power cut loses a file that was not synced, and keeps one that was."""
        lost, kept = self.directory / "lost", self.directory / "kept"
        with kept.open("wb", buffering=0) as file:
            file.write(b"kept")
            os.fsync(file.fileno())
        lost.write_bytes(b"lost")
        self.cut()
        self.remount()
        if lost.exists() or kept.read_bytes() != b"kept":
            raise OSError(errno.EIO, "a power cut does not do what it should")
        kept.unlink()

    def mount(self) -> None:
        """Mounts; the file system replays its log."""
        paths = (self.device.path.encode(), bytes(self.directory), self.kind.encode())
        called(libc.mount(*paths, 0, None), f"mount {self.device.path} ({self.kind})")
        self.mounted = True

    def unmount(self) -> None:
        """Unmounts, waiting for those who still look."""
        patiently(lambda: called(libc.umount2(bytes(self.directory), 0), f"umount {self.directory}"))
        self.mounted = False

    def remount(self) -> None:
        """What a machine does after a power cut."""
        self.unmount()
        self.mount()

    def cut(self) -> None:
        """Cuts the power."""
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Makes everything on this file system durable."""
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            called(libc.syncfs(fd), "syncfs")
        finally:
            os.close(fd)

    def empty(self) -> None:
        """Removes every file."""
        for path in self.directory.iterdir():
            if path.is_dir() and path.name != "lost+found":
                shutil.rmtree(path)

    def close(self) -> None:
        """Unmounts and gives the device back."""
        if self.mounted:
            self.unmount()
        self.device.close()
        self.directory.rmdir()

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
