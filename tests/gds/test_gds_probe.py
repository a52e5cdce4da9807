"""The probe: a process of its own that measures, hangs, crashes or says nonsense, and leaves nothing behind."""

from __future__ import annotations

import importlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gds.conftest import FAKE
from tierload.gds import ProbeResult

module = importlib.import_module("tierload.gds.probe")
MIB = 1 << 20

Says = Callable[[str], None]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where is measured; nothing is left in it."""
    path = tmp_path / "runs"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Says:
    """The other process runs this code, in its scratch folder, in place of a measurement."""

    def says(code: str) -> None:
        start = "import os, sys, time; os.chdir(sys.argv[1]); open('left', 'w').close();"
        monkeypatch.setattr(
            module, "_command", lambda scratch, *rest: [sys.executable, "-c", f"{start}\n{code}", scratch]
        )

    return says


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 over memory of the host."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    path = tmp_path_factory.mktemp("driver")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path / "libcuda.so.1", FAKE / "cuda.c"], check=True)
    return path


@pytest.fixture
def measuring(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process finds the fake kvikio, and a GPU."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))


def test_it_measures_and_says_which_way(folder: Path, measuring: None) -> None:
    found = module.probe(folder, nbytes=9 * MIB + 17)
    assert (found.mode, found.why, found.path) == ("compat", "no nvidia-fs", "compat (no nvidia-fs)")
    assert found.write > 0
    assert found.read > 0
    assert found.kvikio == "26.10.00"


@pytest.mark.parametrize(
    ("task", "why", "again"),
    [
        (
            "    return size if offset and kind == 'read' else None",
            "kvikio gave back other bytes than were written",
            False,
        ),
        (
            "    raise RuntimeError('POSIX error on pwrite: No space left on device')",
            "kvikio (compat (no nvidia-fs)) did not write bytes 0 to 8388608: "
            "POSIX error on pwrite: No space left on device",
            True,
        ),
        (
            "    raise RuntimeError('GPUDirect Storage not supported on current file')",
            "kvikio (compat (no nvidia-fs)) did not write bytes 0 to 8388608: "
            "GPUDirect Storage not supported on current file",
            False,
        ),
    ],
    ids=["other bytes", "full", "refused"],
)
def test_a_kvikio_that_does_not_do_its_work(
    folder: Path, measuring: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, why: str, again: bool
) -> None:
    broken = shutil.copytree(FAKE / "kvikio", tmp_path / "broken" / "kvikio")
    with (broken / "__init__.py").open("a") as file:
        file.write(f"\ndef on_task(kind, offset, size):\n{task}\n")
    monkeypatch.syspath_prepend(broken.parent)
    found = module.probe(folder, nbytes=9 * MIB)
    assert found == ProbeResult(why=why, kvikio="26.10.00", again=again)


@pytest.mark.parametrize(
    ("device", "nbytes", "why"),
    [
        (1, MIB, "RuntimeError: cuDeviceGet: invalid (101)"),
        (0, 1 << 33, "RuntimeError: cuMemAlloc_v2: out of memory (2)"),
    ],
)
def test_what_fails_there_is_a_reason_that_passes(
    folder: Path, measuring: None, device: int, nbytes: int, why: str
) -> None:
    found = module.probe(folder, device=device, nbytes=nbytes)
    assert (found.mode, found.why, found.again) == ("", why, True)


def test_a_hang_ends_with_the_time_limit(folder: Path, child: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    child("time.sleep(60)")
    ended: list[subprocess.Popen[str]] = []
    end = module._end
    monkeypatch.setattr(module, "_end", lambda process: (end(process), ended.append(process)))
    assert module.probe(folder, timeout_s=0.3) == ProbeResult(why="kvikio did not answer within 0.3 s")
    assert [process.returncode for process in ended] == [-signal.SIGKILL]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("os.kill(os.getpid(), 11)", "the probe of kvikio ended with segmentation fault"),
        ("sys.exit('cuFile: no\\nlast words')", "the probe of kvikio ended with status 1: last words"),
        ("os._exit(3)", "the probe of kvikio ended with status 3"),
        ("", "the probe of kvikio gave no result"),
        ("print('rubbish')", "the probe of kvikio gave no result: rubbish"),
        ('print(\'{"mode": "gds"}\')', 'the probe of kvikio gave no result: {"mode": "gds"}'),
        ("sys.stdout.buffer.write(b'\\xff\\n[1]\\n')", "the probe of kvikio gave no result: [1]"),
    ],
)
def test_a_crash_or_nonsense_is_a_reason(folder: Path, child: Says, code: str, why: str) -> None:
    child(code)
    assert module.probe(folder) == ProbeResult(why=why)


def test_words_of_a_library_before_the_result_do_no_harm(folder: Path, child: Says) -> None:
    child("print('cuFile: hello'); from tierload.gds.probe import main; main('.', 0, 1)")
    assert module.probe(folder).why in ("no GPU", "no kvikio: pip install tierload[gds]", "no nvidia-fs")


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    assert (
        module.probe(tmp_path / "gone").why
        == f"nothing can be written in {tmp_path / 'gone'}: No such file or directory"
    )


def test_an_interpreter_that_cannot_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_command", lambda *rest: [""])
    found = module.probe(folder)
    assert found.why.startswith("the probe of kvikio could not be started: ")
    assert found.again
