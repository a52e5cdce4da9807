"""The file that is written."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from .manifest import SHELLS, Tensor


def plain(text: str) -> str:
    """Text without lone surrogates, which no safetensors file holds; `~u` is free in the syntax of keys."""
    return re.sub("[\ud800-\udfff]", lambda match: f"~u{ord(match[0]):04x}", text)


def save(tensors: dict[str, Tensor], texts: dict[str, str], path: Path) -> list[str]:
    """Write a safetensors file, whole or not at all; returns a line for each tensor that it holds as raw bytes."""
    specs: dict[str, safetensors.TensorSpec] = {}
    raw: dict[str, dict[str, Any]] = {}
    for key, (dtype, shape, data) in tensors.items():
        name = "~__metadata__" if key == "__metadata__" else plain(key)  # the one name that is not free
        if dtype.startswith("complex") or dtype in SHELLS or (dtype == "float4_e2m1fn_x2" and not shape):
            raw[name] = {"dtype": dtype, "shape": shape}
            dtype, shape = "uint8", (len(data),)
        pointer = np.frombuffer(data, np.uint8).ctypes.data if data else 0  # `tensors` keeps it alive
        specs[name] = safetensors.TensorSpec(dtype=dtype, shape=shape, data_ptr=pointer, data_len=len(data))
    metadata = {name: plain(text) for name, text in texts.items()} | {"tierload.raw": json.dumps(raw)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)  # 0666 & ~umask; safetensors replaces the file by one of 0600
        os.close(descriptor)
        safetensors.serialize_file(specs, temporary, metadata)
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return [f"{name!r}: {entry['dtype']}{list(entry['shape'])} is held as raw uint8" for name, entry in raw.items()]
