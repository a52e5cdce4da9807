"""Compiles each kernel into PTX that every driver from CUDA 12.0 on translates, and writes it as a C++ literal.

`python native/accelerator/compile.py LIBNVRTC` with the path of libnvrtc.so.12 of CUDA 12.0; `make kernels` fetches it.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
OPTIONS = (b"--gpu-architecture=compute_70", b"--std=c++17", b"--include-path=" + str(FOLDER).encode())  # from Volta on


def compile_kernels(library: str, source: bytes) -> str:
    """The PTX of a source.

    Raises:
        RuntimeError: It does not compile; the compiler's words.
    """
    nvrtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None)
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
    for source in FOLDER.glob("*.cu"):
        ptx = compile_kernels(sys.argv[1], source.read_bytes())
        said = (line.rstrip() for line in ptx.splitlines() if line.strip() and not line.startswith("//"))
        text = "\n".join(line for line in said if "target6detail" not in line)  # of a header of the compiler's
        source.with_suffix(".ptx.inc").write_text(
            f'// Written by native/accelerator/compile.py.\nR"ptx(\n{text}\n)ptx"\n'
        )
