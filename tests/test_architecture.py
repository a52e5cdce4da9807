"""The picture in docs/ARCHITECTURE.md as a test: the rooms, who may import whom, and a few habits of the house."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierload

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tierload"
NATIVE = ROOT / "native"
FOLDERS = ("tierload", "native", "tests", "bench", "examples")
GENERATED = {PACKAGE / "_native.pyi", *NATIVE.glob("accelerator/*.ptx.inc")}

# Python rooms that may import these directly; what stands above them gets it from them.
TORCH_ROOMS = {"state", "heat", "tiers", "engine", "api", "convert", "hooks", "cli"}
NATIVE_ROOMS = {"engine", "catalog", "layout", "state", "tiers"}

# Native rooms, from the bottom: each may include those before it.
ORDER = ("base", "accelerator", "storage", "codec", "journal", "catalog", "engine", "state", "bind")
NEIGHBOURS = {("storage", "codec"), ("codec", "storage")} | {("state", room) for room in ORDER[1:7]}
# The room of each contract in native/include/tierload. storage.h is what everything is written against: the interface
# is at the bottom, and the room `storage` holds its implementations.
CONTRACTS = {
    "accelerator": "accelerator",
    "arrivals": "engine",
    "bytes": "base",
    "device": "base",
    "digest": "base",
    "ending": "base",
    "error": "base",
    "locking": "base",
    "storage": "base",
    "testing": "base",
    "codec": "codec",
    "journal": "journal",
    "catalog": "catalog",
    "clone": "engine",
    "manifest": "catalog",
    "root": "catalog",
    "shard": "catalog",
    "state": "catalog",
    "engine": "engine",
    "staging": "engine",
    "pace": "engine",
}


def sources(*suffixes: str) -> list[Path]:
    """Files of the project with one of these suffixes."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(path for path in files if path not in GENERATED)


def room_of(path: Path) -> str:
    """The room of a Python file: the first name below tierload/."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names that a Python file imports, with the names that it takes out of a package."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or something in it."""
    return name == package or name.startswith(package + ".")


def room_of_include(path: Path, include: str) -> str:
    """The native room that `#include "include"` in a file means."""
    first, _, rest = include.partition("/")
    if first == "tierload":
        assert Path(rest).stem in CONTRACTS, f"{rest}: name its room in CONTRACTS"
        return CONTRACTS[Path(rest).stem]
    return first if rest else path.parent.name


def test_imports_point_down() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_torch_is_imported_in_few_rooms() -> None:
    found = {room_of(path) for path in PACKAGE.rglob("*.py") if any(within(name, "torch") for name in imports(path))}
    assert found <= TORCH_ROOMS


def test_kvikio_is_imported_in_one_room_and_only_when_it_is_asked_for() -> None:
    found = {room_of(path) for path in PACKAGE.rglob("*.py") if any(within(name, "kvikio") for name in imports(path))}
    assert found == {"gds"}
    code = "import sys, tierload.gds.probe; sys.exit('kvikio' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_native_module_is_imported_in_few_rooms() -> None:
    native = "tierload._native"
    found = {room_of(path) for path in PACKAGE.rglob("*.py") if any(within(name, native) for name in imports(path))}
    assert found <= NATIVE_ROOMS


def test_rooms_do_not_use_the_public_names() -> None:
    public = {"tierload", *(f"tierload.{name}" for name in tierload.__all__)}
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    assert not [(path, name) for path in files for name in imports(path) if name in public]


def test_rescue_stands_apart() -> None:
    files = [PACKAGE / "rescue.py", *PACKAGE.glob("rescue/**/*.py")]
    taken = {name for path in files if path.exists() for name in imports(path)}
    assert not [name for name in taken if within(name, "tierload") and not within(name, "tierload.rescue")]


@pytest.mark.parametrize("name", ["tierload", "tierload.rescue", "tierload.cli"])
def test_starts_without_torch(name: str) -> None:
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", tierload.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(tierload, name).__name__ == name


def test_native_includes_point_down() -> None:
    wrong = []
    for path in sources(".cpp", ".h", ".inc"):
        parts = path.relative_to(NATIVE).parts if path.is_relative_to(NATIVE) else ("outside",)
        room = CONTRACTS.get(path.stem, "unknown") if parts[0] == "include" else parts[0]
        text = path.read_text()
        if room != "bind" and re.search(r'#\s*include\s*[<"](Python\.h|nanobind/)', text):
            wrong.append(f"{path}: Python is known in bind/ only")
        if room in ("tests", "fuzz", "bench"):
            continue
        assert room in ORDER, f"{path}: no room of that name"
        for include in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            other = room_of_include(path, include)
            if ORDER.index(other) > ORDER.index(room) or (room, other) in NEIGHBOURS:
                wrong.append(f"{path}: {room} includes {include} of {other}")
    assert not wrong


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources(".py", ".cpp", ".h", ".inc", ".sh")}
    assert not {path: length for path, length in lengths.items() if length > 500}


def test_nothing_is_called_utils() -> None:
    assert not [path for path in sources(".py", ".cpp", ".h") if re.fullmatch(r"_?utils?", path.stem)]
