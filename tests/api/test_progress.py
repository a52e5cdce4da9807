"""Progress as people see it: on a terminal, in a file, and where there is nothing to see it on."""

from __future__ import annotations

import sys

import pytest

from tests.cli.support import on_a_terminal
from tierload.observe import Progress


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress("waiting") as shown:
        shown.update(0, 2048)
        assert capsys.readouterr().err == "", "not so soon"
        monkeypatch.setattr("tierload.observe.progress._LINE_S", 0.0)
        shown.update(1024, 2048)
        shown.update(1536, 2048, "the save of step 200")
    assert capsys.readouterr().err == (
        "waiting: 1.0 KiB of about 2.0 KiB\nwaiting: 1.5 KiB of about 2.0 KiB, the save of step 200\n"
    )


def test_a_bar_on_a_terminal() -> None:
    """With what it is about as it is, not as markup; and nothing of it remains."""
    code = """
import tierload.observe.progress as p
p._DRAW_S = 0
with p.Progress("[title]") as shown:
    shown.update(1024, 2048, "[red]")
    shown.update(0, 0)
p.say("the end")
"""
    shown = on_a_terminal(sys.executable, "-c", code, COLUMNS="200")
    assert "[title]" in shown
    assert "[red]" in shown
    assert "1.0/2.0 KiB" in shown
    assert shown.endswith("\x1b[2Kthe end\r\n"), "the line was cleared"


@pytest.mark.parametrize("state", ["closed", "none", "full"])
def test_a_stream_that_takes_nothing(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierload.observe.progress._LINE_S", 0.0)
    with open("/dev/full", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stderr", None if state == "none" else stream)
        if state == "closed":
            stream.close()
        with Progress("waiting") as shown:
            shown.update(1, 2)
            shown.update(2, 2)
        monkeypatch.undo()
        if state == "full":
            with pytest.raises(OSError, match="No space"):
                stream.close()
