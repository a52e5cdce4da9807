from __future__ import annotations

from typing import Any

FIRST = {"compat_mode": 2, "num_threads": 1, "task_size": 4 << 20}
settings: dict[str, Any] = dict(FIRST)
compat_preferred = False


class _Back:
    def __init__(self, before: dict[str, Any]) -> None:
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        settings.update(self._before)


def set(config: dict[str, Any]) -> _Back:
    before = {name: settings[name] for name in config}
    settings.update(config)
    return _Back(before)


def get(name: str) -> Any:
    return settings[name]


def is_compat_mode_preferred() -> bool:
    return compat_preferred
