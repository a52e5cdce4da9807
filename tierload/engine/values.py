"""Small typed values on their way to and from bytes: metrics, recorded values, notes."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence

from tierload.errors import CorruptStore, InvalidRequest
from tierload.state import NO_CHUNKS, flatten, plan_load

__all__ = [
    "decode_recorded",
    "decode_value",
    "encode_meta",
    "encode_recorded",
    "meta_of",
    "metrics_of",
    "step_of",
    "tags_of",
]

_SCALARS = (bool, int, float, str)


def encode_recorded(key: str, value: object, step: int | None) -> bytes:
    """The bytes of a recorded value: docs/FORMAT.md section 5.3.

    Raises:
        InvalidRequest: The value holds tensors or arrays.
        UnsupportedValue: It cannot be stored.
    """
    flat = flatten({"value": value, "step": step})
    if flat.chunks:
        raise InvalidRequest(
            f"record({key!r}) is for small values; {flat.chunks.key(0)!r} is a tensor: save it instead"
        )
    return flat.document


def decode_recorded(document: bytes) -> tuple[object, int | None]:
    """The value and the step of a recorded value."""
    both = plan_load(document, NO_CHUNKS).finish()
    if not isinstance(both, dict) or both.keys() != {"value", "step"}:
        raise CorruptStore("a recorded value is no pair of value and step, so its record was forged")
    return both["value"], both["step"]


def meta_of(metrics: dict[str, object], note: str) -> dict[str, object]:
    """What a commit's meta says of itself: docs/FORMAT.md section 5.2.

    Raises:
        InvalidRequest: A metric is a tensor.
    """
    flat = flatten(metrics)
    if flat.chunks:
        raise InvalidRequest(f"metrics are numbers and texts; {flat.chunks.key(0)!r} is a tensor: use .item()")
    meta: dict[str, object] = {"metrics": json.loads(flat.document)["root"]}
    if note:
        meta["note"] = note
    return meta


def metrics_of(meta: Mapping[str, object]) -> dict[str, object]:
    """The metrics that ``meta_of`` was given."""
    metrics = decode_value(meta["metrics"])
    assert isinstance(metrics, dict)
    return metrics


def step_of(step: object) -> int | None:
    """A step as the journal holds it; one of numpy or a tensor of one number is whole too.

    Raises:
        InvalidRequest: It is no whole number of 64 bits.
    """
    if step is None:
        return None
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise InvalidRequest(f"step is {step!r}; use a whole number of 64 bits, or None")
    return int(number)


def tags_of(tags: Sequence[str]) -> tuple[str, ...]:
    """The tags of a commit.

    Raises:
        InvalidRequest: They are one text, which would be as many tags as it has letters.
    """
    if isinstance(tags, str):
        raise InvalidRequest(f"tags is {tags!r}; use a list: [{tags!r}]")
    return tuple(tags)


def encode_meta(meta: dict[str, object]) -> bytes:
    """A commit's meta as the journal holds it."""
    return json.dumps(meta, separators=(",", ":")).encode("ascii")


def decode_value(node: object) -> object:
    """The value that a node of a state document stands for."""
    plain = node.get("d") if isinstance(node, dict) else None
    if isinstance(plain, dict) and all(value is None or isinstance(value, _SCALARS) for value in plain.values()):
        return plain  # what metrics nearly always are, for each of a thousand commits
    try:
        document = json.dumps({"version": 1, "root": node}).encode("ascii")
    except RecursionError:
        raise CorruptStore("a metric nests deeper than any that can be saved") from None
    return plan_load(document, NO_CHUNKS).finish()
