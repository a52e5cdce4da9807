"""A folder as ``trainer.save_model`` makes it, of any commit."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tierload.api import load
from tierload.api import open as open_store
from tierload.convert import export_state
from tierload.errors import InvalidRequest
from tierload.hooks.transformers.files import BASE, adapter_folders
from tierload.types import Commit

__all__ = ["export"]

_CONFIG = "config.json"


def export(
    store: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    commit: str | Commit | None = None,
    tag: str | None = None,
) -> Commit:
    """Writes the model of a commit (the newest) into ``folder``, which must not exist or be empty: what
    ``from_pretrained`` of models, tokenizers and processors reads, bit for bit as ``save_model`` would have written it.
    Of a model with adapters, these, for ``PeftModel.from_pretrained``. Gives the commit.

    Raises:
        CommitNotFound, KeyMismatch: There is no such commit, or it has no model.
        InvalidRequest: The folder is not empty, or the adapters' base is of a class that transformers does not have.
    """
    target = Path(os.path.realpath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidRequest(f"{folder} exists and is not an empty folder")
    with open_store(store) as opened:
        found = opened.find(step=step, commit=commit, tag=tag)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    draft.mkdir()  # of the mode that the umask gives: one of tempfile's would be for us alone
    try:
        _write(store, found, draft)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft)
        raise
    return found


def _write(store: str | os.PathLike[str], commit: Commit, draft: Path) -> None:
    content: Any = load(store, commit=commit, keys=["files"], rank=0)
    with tempfile.TemporaryDirectory() as place:
        files = content["files"].write_to(Path(place) / "files")
        model = _empty(files, commit)
        if model is None:
            export_state(store, f"{draft}{os.sep}", commit=commit, root="model")
        else:
            state: Any = load(store, commit=commit, keys=["model"])
            model.load_state_dict(state["model"], assign=True)
            model.save_pretrained(draft)
        shutil.rmtree(files / BASE, ignore_errors=True)
        shutil.copytree(files, draft, dirs_exist_ok=True)  # as they were at the commit


def _empty(files: Path, commit: Commit) -> Any:
    """The commit's model without memory for its weights; None where transformers has no such class, or builds it
    otherwise than by its configuration alone."""
    folders = adapter_folders(files)
    base = files / BASE if folders else files
    cls = None
    if (base / _CONFIG).exists():
        config = json.loads((base / _CONFIG).read_text(encoding="utf-8"))
        if not config.get("quantization_config"):
            cls = getattr(transformers, (config.get("architectures") or [""])[0], None)
    if cls is None:
        if folders:
            raise InvalidRequest(
                f"the base of the adapters in commit {commit.id[:12]} is no model that transformers can build; "
                "tierload.export_state writes all of its tensors"
            )
        return None
    with torch.device("meta"):
        model = cls(cls.config_class.from_pretrained(base))
        return _with_adapters(model, folders) if folders else model


def _with_adapters(model: Any, folders: dict[str, Path]) -> Any:
    from peft import PeftConfig, get_peft_model

    wrapped: Any = None
    for name, folder in folders.items():
        config = PeftConfig.from_pretrained(str(folder))
        if wrapped is None:
            wrapped = get_peft_model(model, config, adapter_name=name)
        else:
            wrapped.add_adapter(name, config)
    return wrapped
