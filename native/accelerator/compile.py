"""Compiles kernels.cu into PTX that every driver from CUDA 12.0 on translates, and writes it as a C++ literal.

`python native/accelerator/compile.py LIBNVRTC` with the path of libnvrtc.so.12 of CUDA 12.0; `make kernels` fetches it.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
OPTIONS = (b"--gpu-architecture=compute_70", b"--std=c++17")  # Volta: the oldest that torch runs on


def compile_kernels(library: str, source: bytes) -> str:
    """The PTX of a source.

    Raises:
        RuntimeError: It does not compile; the compiler's words.
    """
    nvrtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
    if made != 0:
        raise RuntimeError(f"nvrtcCreateProgram: {made}")
    failed = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), (ctypes.c_char_p * len(OPTIONS))(*OPTIONS))
    if failed:
        raise RuntimeError(_text(nvrtc, program, "ProgramLog"))
    return _text(nvrtc, program, "PTX")


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


if __name__ == "__main__":
    ptx = compile_kernels(sys.argv[1], (FOLDER / "kernels.cu").read_bytes())
    lines = [
        line.rstrip()
        for line in ptx.splitlines()
        if line.strip() and not line.startswith("//") and "target6detail" not in line
    ]
    text = "\n".join(lines)
    (FOLDER / "kernels.ptx.inc").write_text(f'// Written by native/accelerator/compile.py.\nR"ptx(\n{text}\n)ptx"\n')
