"""What a ``checkpoint_id`` means: its last name has the step of a commit in it, or is its tag."""

from __future__ import annotations

import os
import re

__all__ = ["commit_named"]

_STEP = re.compile(r"([0-9]+)(\.[A-Za-z]\w*)?$")


def commit_named(checkpoint_id: str | os.PathLike[str], path: str) -> tuple[int | None, str | None]:
    """The step and the tag that an id names, one of them or, where it is the store's own path, neither.

    ``runs/x/step-100`` and ``100`` are step 100; ``runs/x/best`` is tag ``best``.
    """
    text = os.fspath(checkpoint_id)
    if os.path.realpath(text) == os.path.realpath(path):
        return None, None
    name = os.path.basename(text.rstrip("/"))
    found = _STEP.search(name)
    return (int(found[1]), None) if found else (None, name)
