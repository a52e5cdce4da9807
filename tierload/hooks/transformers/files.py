"""The files that a saved model has beside its weights: configurations, tokenizer or processor, code."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tierload.state import Folder

__all__ = ["BASE", "adapter_folders", "files_of"]

BASE = "base"
"""The folder, among the files of a model with adapters, of what its base has."""

_ADAPTER = "adapter_config.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")  # and pickles: what a subclass adds, too


def files_of(trainer: Any) -> Folder:
    """What ``trainer.save_model`` writes, without weights and pickles."""
    model = trainer.model
    adapters = hasattr(model, "get_base_model") and hasattr(model, "peft_config")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        # The trainer's own way, so that what a subclass adds is in it; but without weights, where that can be said.
        trainer._save(place, state_dict=None if adapters else {})
        base: Any = model.get_base_model() if adapters else None
        if hasattr(base, "config"):
            config = base.config.to_dict() | {"architectures": [type(base).__name__]}
            (folder / BASE).mkdir()
            (folder / BASE / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        for path in [path for pattern in _WEIGHTS for path in folder.rglob(pattern)]:
            path.unlink()
        (folder / "training_args.json").write_text(trainer.args.to_json_string(), encoding="utf-8")
        return Folder.loaded(Folder(folder).entry())


def adapter_folders(files: Path) -> dict[str, Path]:
    """Where the files of each adapter are, by its name."""
    found = {path.parent.name: path.parent for path in sorted(files.glob(f"*/{_ADAPTER}"))}
    return ({"default": files} if (files / _ADAPTER).exists() else {}) | found
