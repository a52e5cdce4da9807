"""Files of ``torch.save``, both ways. They are written and read as ``weights_only`` allows: nothing in one is run."""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import io
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import IO, Any

import numpy as np
import torch

from tierload.convert.bits import problem_of
from tierload.convert.leaves import array_tensor, children, is_fields, leaves
from tierload.errors import CorruptFile, UnsupportedValue
from tierload.state.compounds import kind_of_tensor
from tierload.state.keys import ROOT, Path
from tierload.state.registry import is_wrapper

__all__ = ["DAMAGE", "Loadable", "check", "check_sums", "read", "refusals", "write"]

_SINGLE = (type(None), bool, int, float, complex, str, bytes, bytearray)
_TORCH = (torch.Size, torch.dtype, torch.device, torch.layout)

DAMAGE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, EOFError, ArithmeticError)
"""What torch and Python raise for files that no writer gives."""

_PIECE_BYTES = 4 << 20

_REFUSED = re.compile(r"(Unsupported (?:global|class|operand|persistent id)[^\n]*?|Trying to [^\n]*?)(?:\. |\n|$)")


class Loadable:
    """A state as ``torch.load(weights_only=True)`` takes it: the same containers around the same tensors.

    ``changed`` are places whose value has another form now, ``left_out`` those whose value torch would refuse.

    Raises:
        UnsupportedValue: The state nests deeper than torch can follow, or is as a whole something that torch refuses.
    """

    def __init__(self, state: object) -> None:
        self.changed: list[tuple[str, str]] = []
        self.left_out: list[tuple[str, str]] = []
        self._made: dict[int, object] = {}
        self._kept: list[object] = []
        try:
            self.state = self._convert(state, ROOT)
        except RecursionError:
            raise _too_deep() from None
        if self.state is _LEFT_OUT:
            raise UnsupportedValue(f"the state is {self.left_out[0][1]}: there is nothing to export")

    def _convert(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if _is_single(value):
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        self._kept.append(value)
        made: Any
        if isinstance(value, Mapping) or (is_fields(value) and not isinstance(value, tuple)):
            made = self._mapping(value, path)
        elif children(value, path) is not None:
            made = self._sequence(value, path)
        elif type(value) is set and all(map(_is_plain, value)):
            made = value
        else:
            return self._other(value, path)
        return made

    def _tensor(self, value: torch.Tensor, path: Path) -> object:
        reason = ""
        if is_wrapper(type(value)) and not value.is_nested:
            reason = f"{kind_of_tensor(value)}, which torch would refuse to load"
        elif value.layout is torch.strided and value.is_nested and not value.unbind():
            reason = "a nested tensor without components, which torch fails to load"
        elif not value.is_quantized and not _has_storage(value.dtype):
            reason = f"a tensor of {value.dtype}, which torch.save does not take"
        if reason:
            self.left_out.append((path.text(), reason))
        return _LEFT_OUT if reason else value

    def _mapping(self, value: Any, path: Path) -> dict[Any, Any]:
        kind = type(value) if type(value) in (dict, collections.OrderedDict, collections.Counter) else dict
        if kind is not type(value):
            self.changed.append((path.text(), f"was a {type(value).__qualname__}, is a dict"))
        made: dict[Any, Any] = kind()
        self._made[id(value)] = made  # before what is in it, which may refer to it
        keys = list(value) if isinstance(value, Mapping) else [element for element, _ in children(value, path) or ()]
        for key, (element, inner) in zip(keys, children(value, path) or (), strict=True):
            place = path.child(element)
            if _is_plain(key):
                converted = self._convert(inner, place)
                if converted is not _LEFT_OUT:
                    made[key] = converted
            else:
                self.left_out.append((place.text(), f"its key is a {type(key).__qualname__}, which torch would refuse"))
        metadata = getattr(value, "_metadata", None)
        if kind is collections.OrderedDict and metadata is not None:
            made._metadata = self._convert(metadata, path.inner())  # type: ignore[attr-defined]
        return made

    def _sequence(self, value: Any, path: Path) -> list[Any] | tuple[Any, ...]:
        kind = tuple if isinstance(value, tuple) else list
        if kind is not type(value):
            self.changed.append((path.text(), f"was a {type(value).__qualname__}, is a {kind.__name__}"))
        made: list[Any] = []
        if kind is list:
            self._made[id(value)] = made
        for element, inner in children(value, path) or ():
            converted = self._convert(inner, path.child(element))
            made.append(None if converted is _LEFT_OUT else converted)  # so that the others keep their places
        if kind is list:
            return made
        self._made[id(value)] = whole = tuple(made)
        return whole

    def _other(self, value: Any, path: Path) -> object:
        made: object = array_tensor(value)
        if made is not None:
            self.changed.append((path.text(), "was a NumPy array, is a tensor"))
        elif isinstance(value, np.generic) and type(value.item()) in _SINGLE:
            made = value.item()
            self.changed.append((path.text(), f"was a NumPy {value.dtype}, is a {type(made).__name__}"))
        else:
            what = "empty bytes" if type(value) is bytes else f"a {type(value).__qualname__}"
            self.left_out.append((path.text(), f"{what}, which torch would refuse to load"))
            return _LEFT_OUT
        self._made[id(value)] = made
        return made


_LEFT_OUT = object()


@functools.cache
def _has_storage(dtype: torch.dtype) -> bool:
    # torch is asked, so that there is no second table of dtypes that differs from its own.
    try:
        torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except KeyError:
        return False
    return True


def _too_deep() -> UnsupportedValue:
    return UnsupportedValue("the state nests deeper than torch.save can follow; export a part of it (root, --root)")


def _is_single(value: object) -> bool:
    """Whether torch loads a value that holds no others; empty bytes, of all things, it does not."""
    return type(value) in _SINGLE + _TORCH and not (type(value) is bytes and not value)


def _is_plain(key: object) -> bool:
    """Whether torch loads a value inside a set or as a key."""
    return _is_single(key) or (type(key) is tuple and all(map(_is_plain, key)))


def write(state: object, path: FilePath) -> None:
    """Writes one file.

    Raises:
        OSError: The disk is full or failed.
        UnsupportedValue: The state nests deeper than torch can follow.
    """
    with path.open("r+b") as file:  # by a file object: a name would become part of the content
        try:
            torch.save(state, file)
        except RecursionError:
            raise _too_deep() from None
        except RuntimeError as error:  # torch's own, over the one of the file
            if isinstance(error.__context__, OSError):
                cause = error.__context__
                raise OSError(cause.errno, cause.strerror, str(path)) from error
            raise


def check(state: object, path: FilePath) -> None:
    """Reads a file back and compares it with what was to be written.

    Raises:
        CorruptFile: It holds something else.
    """
    found, expected = list(leaves(read(path))), list(leaves(state))
    if [place.text() for place, _ in found] != [place.text() for place, _ in expected]:
        raise CorruptFile(f"{path}: the keys that were read back are not those that were written")
    for (place, value), (_, other) in zip(found, expected, strict=True):
        problem = problem_of(value, other)
        if problem:
            raise CorruptFile(f"{path}: what was read back at {place.shown()} is not what was written: {problem}")


def read(path: FilePath) -> object:
    """The content of a file. Tensors are views of the mapped file (of memory, for files of torch before 1.6).

    Raises:
        CorruptFile: The file is damaged, or holds more than tensors and plain values, which might run code.
    """
    path.open("rb").close()  # torch's own errors do not always say which file
    with refusals(str(path)):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


@contextlib.contextmanager
def refusals(where: str) -> Iterator[None]:
    """What torch raises for content that is damaged or would run code, as the error for it."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CorruptFile(f"{where}: {_refused(str(error))}") from error
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # what torch says of a file that was cut
            raise
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CorruptFile(f"{where}: cannot be read as a file of torch.save: {reason}") from error


def check_sums(source: FilePath | IO[bytes], where: str) -> None:
    """Reads a whole file and compares it with the checksums in it, which torch itself does not look at.

    Raises:
        CorruptFile: They differ.
    """
    if not zipfile.is_zipfile(source):
        return
    try:
        with zipfile.ZipFile(source) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise CorruptFile(
                        f"{where}: its part {record.filename!r} is compressed, which torch.save never does"
                    )
                if record.CRC:  # without checksums (torch.serialization.set_crc32_options) they are 0
                    with archive.open(record) as part:
                        while part.read(_PIECE_BYTES):
                            pass
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise CorruptFile(f"{where}: cannot be read as a file of torch.save: {error}") from error


def _refused(message: str) -> str:
    """The part of torch's message that says what is wrong; the rest is advice to run the file's code."""
    found = _REFUSED.search(message)
    if found is None:
        return "cannot be read as a file of torch.save: it is damaged, or no such file"
    return (
        f"refused, since it holds more than tensors and plain values, which could run any code when read: {found[1]}. "
        "If you trust the file, load it yourself, and torch.save what you need of it"
    )
