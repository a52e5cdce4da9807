"""Whether kvikio, and storage that talks to GPUs directly, is to be had here; and if not, why not, by name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from tierload.gds.device import device_count
from tierload.gds.tuning import TASK_BYTES, threads

__all__ = ["absence", "facts", "first_line", "loaded", "refusal", "version"]

_DRIVER = Path("/proc/driver/nvidia-fs")


def loaded() -> tuple[ModuleType | None, str]:
    """The module kvikio with the parts of it that are used here, or None and why it is not to be had."""
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except ModuleNotFoundError as error:
        if error.name == "kvikio":
            return None, "no kvikio: pip install tierload[gds]"
        return None, f"kvikio cannot be imported: {error}"
    except Exception as error:  # noqa: BLE001 - it loads libraries of CUDA: RuntimeError, OSError, whatever they raise
        return None, f"kvikio cannot be imported: {first_line(error)}"
    return kvikio, ""


def absence() -> str:
    """Why kvikio can move nothing at all between files and GPUs here; empty where it can."""
    if not device_count():
        return "no GPU"
    return loaded()[1]


def refusal() -> str:
    """Why data does not go directly between storage and GPUs here: short, by name. Empty where nothing is in the way.

    It asks and moves nothing. What cuFile says of a file system, only a probe finds out.
    """
    if why := absence():
        return why
    if not _DRIVER.exists():  # before anything of cuFile: without the driver it can hang
        return "no nvidia-fs"
    kvikio, _ = loaded()
    assert kvikio is not None
    if kvikio.cufile_driver.libcufile_version() == (0, 0):
        return "no libcufile"
    # By KVIKIO_COMPAT_MODE, or since /run/udev cannot be read, as in a container that was not given it.
    return "compat mode" if kvikio.defaults.is_compat_mode_preferred() else ""


def version() -> str:
    """The version of kvikio; empty where there is none."""
    kvikio, _ = loaded()
    return "" if kvikio is None else str(kvikio.__version__)


def facts() -> tuple[tuple[str, str], ...]:
    """What a person wants to know of a kvikio that works here, in the order in which it is shown."""
    if absence():
        return ()
    kvikio, _ = loaded()
    assert kvikio is not None
    why = refusal()
    return (
        ("kvikio", version()),
        ("kvikio's mode", f"compat ({why})" if why else "gds"),
        ("kvikio's tasks", f"{threads(kvikio)} threads, {TASK_BYTES >> 20} MiB each"),
        ("nvidia-fs", _driver_version()),
    )


def _driver_version() -> str:
    if not _DRIVER.exists():
        return "not loaded"
    try:
        return (_DRIVER / "version").read_text().strip().removeprefix("version: ")
    except OSError:
        return "loaded"


def first_line(error: BaseException) -> str:
    """An error as a phrase: its class, and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
