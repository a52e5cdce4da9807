"""A save by all ranks of a job, one commit: describe → agree → each writes its part → rank 0 commits (docs/FORMAT.md
section 9). Every rank runs this code; what it says to the others are digests and rows of a few bytes."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tierload import _native
from tierload.engine.describing import Description, describe
from tierload.engine.devices import Device
from tierload.engine.job import Job
from tierload.engine.loading import table_of
from tierload.engine.pieces import pieces_of, shared_parts, state_of
from tierload.engine.saving import OUT_OF_SPACE, Draft, Effort, Saved, io_of, out_of_space, page_set
from tierload.engine.values import encode_meta, metrics_of
from tierload.errors import RanksDisagree, StoreIOError
from tierload.layout import PagePlan, Placement, place_pages, plan_pages
from tierload.settings import Settings
from tierload.state import write_documents, write_heat
from tierload.types import Commit, FlatState

__all__ = ["Around", "refuse_together", "save_together"]

_ROW_BYTES = 64


@dataclass(frozen=True, slots=True)
class Around:
    """What a save by all ranks needs of the store. ``parent`` gives the commit whose pages may be referenced (0: none),
    and ``parents`` its shards, as far as they may have pages that this rank writes, with the row that the root has of
    this rank's own (none: b""); it may look at the store anew: ``native`` is another one then. ``device`` may have to
    be measured first. ``lock`` is held while the catalog is used."""

    native: Callable[[], _native.Store]
    lock: threading.RLock
    job: Job
    parent: Callable[[], int]
    parents: Callable[[int], tuple[Sequence[_native.Manifest], bytes]]
    threads: int
    device: Callable[[], Device]
    bucket: _native.TokenBucket | None
    committed: Callable[..., Commit]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What rank 0 has decided: the transaction, the commit that it continues, and which units are each rank's own."""

    epoch: int
    txid: int
    parent: int
    own: list[bool]


def save_together(around: Around, draft: Draft, settings: Settings, effort: Effort) -> tuple[Saved, bytes]:
    """Writes a state of which every rank has a part, and commits it. Gives this rank's row of the root besides.

    Raises:
        RanksDisagree: Their steps, keys, shapes or replicas differ; all differences are listed, nothing was written.
        StoreIOError, RankLost, ...: What went wrong first, on whatever rank; nothing is committed.
    """
    job = around.job
    job.failed = True  # until it has succeeded
    job.channel.begin()
    save = _Together(around, draft, settings, effort)
    try:
        saved = save.run()
    finally:
        save.end()
    job.failed = False
    return saved


def refuse_together(job: Job, error: BaseException) -> None:
    """Tells the others that this rank cannot even describe its state.

    Raises:
        BaseException: ``error``, or what went wrong before it on another rank.
    """
    job.failed = True
    job.channel.begin()
    job.channel.round("describing the state", error, lambda parts: b"")


class _Together:
    def __init__(self, around: Around, draft: Draft, settings: Settings, effort: Effort) -> None:
        self._around = around
        self._job = around.job
        self._draft = draft
        self._settings = settings
        self._effort = effort
        self._save: _native.Save | None = None
        self._held: Sequence[_native.Manifest] = ()  # what pages are referenced in has to stay until the commit
        self._moved = around.native().direct_bytes
        self._done: Commit | None = None  # on rank 0, what it has committed

    def end(self) -> None:
        """Whatever happened, the attempt is over: its files are gone, unless they are part of a commit."""
        if self._save is not None:
            with self._around.lock:
                self._save.abort()

    def run(self) -> tuple[Saved, bytes]:
        """The rounds, and what each rank does between them."""
        about: Description | BaseException
        try:
            about = self._describe()
        except BaseException as error:  # noqa: BLE001 - the next round raises it, on every rank
            about = error
        plan = self._agree(about)
        assert isinstance(about, Description)
        row: bytes | BaseException
        try:
            row = self._write(about, plan)
        except BaseException as error:  # noqa: BLE001 - likewise
            row = error
        answer = self._job.channel.round("committing", row, self._commit)
        if _native.terminating():
            self._job.channel.close()  # SIGTERM was held back for this save only, and others may not have heard yet
        assert self._save is not None
        assert isinstance(row, bytes)
        commit = self._done or self._committed(json.loads(answer))
        return Saved(commit, self._save), row[:_ROW_BYTES]

    # Before anything is written

    def _describe(self) -> Description:
        self._effort.check()  # every value has been copied, and they are of one moment
        flat = self._draft.flat
        if self._effort.staging is not None:
            rows, places = self._draft.plan.rows, self._effort.staging.places()
            within = rows["page_offset"].astype(np.uint64)
            has_bytes = rows["pages"] > 0
            pointers = np.zeros(len(rows), np.uint64)
            pointers[has_bytes] = places[rows["first_page"][has_bytes]] + within[has_bytes]
            flat = replace(flat, pointers=pointers, strides={}, devices=np.zeros_like(flat.devices))
        return describe(flat, self._settings.per_rank, self._job.rank, self._settings.page_bytes, self._around.threads)

    def _agree(self, about: Description | BaseException) -> _Plan:
        channel = self._job.channel
        mine: Description | BaseException | bytes = about
        if isinstance(about, Description):
            reference = channel.read("rank 0's keys") if self._job.rank > 0 else b""
            try:
                mine = json.dumps(self._compared(about, reference)).encode()
            except BaseException as error:  # noqa: BLE001 - the round raises it, on every rank
                mine = error
        assert not isinstance(mine, Description)
        plan = json.loads(channel.round("describing the state", mine, lambda parts: self._decide(about, parts)))
        if "clash" in plan:
            assert isinstance(about, Description)
            _explain(self._job, about, plan["clash"])
        own = np.unpackbits(np.frombuffer(base64.b64decode(plan["own"]), np.uint8), count=plan["units"])
        return _Plan(plan["epoch"], plan["txid"], plan["parent"], own.astype(bool).tolist())

    def _compared(self, about: Description, reference: bytes) -> dict[str, object]:
        """What this rank hands in: in what it is not like rank 0."""
        settings, job = self._settings, self._job
        alike = {"page_bytes": settings.page_bytes, "pack_below_bytes": settings.pack_below_bytes}
        mine: dict[str, object] = {"step": self._draft.step, "settings": alike, "replicas": about.replicas}
        if job.rank == 0:
            packed = [about.outline.encode(), about.packed_lines(), about.digests.tobytes()]
            job.channel.post("rank 0's keys", b"\n".join(base64.b64encode(part) for part in packed))
            return mine
        outline, lines, digests = (base64.b64decode(p) for p in reference.split(b"\n"))
        if outline != about.outline.encode():
            return mine | {"differences": about.differences(lines, job.rank)}
        unequal = about.unequal(digests) | about.alone
        return mine | ({"unequal": base64.b64encode(np.packbits(unequal).tobytes()).decode()} if unequal.any() else {})

    def _decide(self, about: Description | BaseException, parts: Sequence[bytes]) -> bytes:
        """On rank 0, when all have handed in: begins the transaction."""
        assert isinstance(about, Description)
        ranks = [json.loads(part) for part in parts]
        differences: list[str] = []
        for rank, there in enumerate(ranks):
            differences += [
                f"rank {rank} saves with {name} {there[name]!r}, and rank 0 with {ranks[0][name]!r}"
                for name in ("step", "settings")
                if there[name] != ranks[0][name]
            ]
            differences += there.get("differences", ())
        if differences:
            raise RanksDisagree("the ranks do not save the same state, so nothing was written", differences=differences)
        if clash := _clash([there["replicas"] for there in ranks]):
            return json.dumps({"clash": clash}).encode()
        own = about.alone.copy()
        for there in ranks:
            if "unequal" in there:
                bits = np.frombuffer(base64.b64decode(there["unequal"]), np.uint8)
                own |= np.unpackbits(bits, count=len(own)).astype(bool)
        self._refuse_own(about, own)
        with self._around.lock:
            parent = self._around.parent()
            self._save = _native.Save(self._around.native(), ranks=self._job.ranks)
        mask = base64.b64encode(np.packbits(own).tobytes()).decode()
        return json.dumps(
            {"epoch": self._save.epoch, "txid": self._save.txid, "parent": parent, "own": mask, "units": len(own)}
        ).encode()

    def _refuse_own(self, about: Description, own: npt.NDArray[np.bool_]) -> None:
        """What cannot be each rank's own: values that were declared to be replicated, and parts of spread tensors."""
        declared = np.array(about.matching(self._settings.replicated), np.bool_)
        parts = about.spread & ~declared
        if (own & (declared | parts)).any():
            units = [unit.key for unit in about.cut.units]
            differences = [f"{units[number]!r} differs between ranks" for number in np.flatnonzero(own & declared)]
            differences += [
                f"{units[number]!r} is spread over ranks, and so is not the value of one of them: but it shares memory "
                "with one that is, or the ranks have it in other forms"
                for number in np.flatnonzero(own & parts)
            ]
            raise RanksDisagree(
                "values that have to be the same on all ranks are not, so nothing was written", differences=differences
            )

    # Writing

    def _write(self, about: Description, plan: _Plan) -> bytes:
        around, settings, job = self._around, self._settings, self._job
        self._held, before = around.parents(plan.parent)
        if self._save is None:
            with around.lock:
                self._save = _native.Save.of_rank(
                    around.native(), epoch=plan.epoch, txid=plan.txid, rank=job.rank, ranks=job.ranks
                )
        save, effort = self._save, self._effort
        parts = shared_parts(about.cut, plan.own, about.flat, job.ranks, settings.page_bytes)
        pieces = pieces_of(about.cut, plan.own, about.flat, parts, job.rank)
        document = write_documents(about.cut, plan.own, about.flat, parts if job.rank == 0 else None, job.ranks)
        if self._draft.heat is not None and job.rank == 0:
            document = write_heat(document, self._draft.heat)
        state = state_of(about.flat, pieces, document)
        pages = plan_pages(state, settings.page_bytes, settings.pack_below_bytes)
        heat = self._draft.heat
        placement = None if heat is None else place_pages(pages, heat, settings.hot_budget_bytes)
        progress = effort.progress or _native.Progress()
        try:
            with job.channel.working("writing", lambda: progress.bytes):
                save.write(
                    pages=page_set(pages, placement),
                    staging=None,
                    parents=list(self._held),
                    compression=settings.compression,
                    device_rate=around.device().write,
                    read_rate=around.device().read,
                    threads=around.threads,
                    segment_bytes=settings.max_segment_size_mb << 20,
                    flush_interval_ms=settings.flush_interval_ms,
                    bucket=around.bucket,
                    background=effort.background,
                    cancel=effort.cancel,
                    progress=progress,
                )
                self._write_shard(save, state, pages, placement, before)
                save.flush()
        except StoreIOError as error:
            if error.errno in OUT_OF_SPACE:
                raise out_of_space(error, around.native(), int(state.chunks.nbytes.sum())) from error
            raise
        return save.row + struct.pack("<QQ", save.raw_bytes, save.written_bytes)

    def _write_shard(
        self, save: _native.Save, state: FlatState, pages: PagePlan, placement: Placement | None, row: bytes
    ) -> None:
        """This rank's manifest, unless the parent's is the same."""
        rows = pages.rows.view(np.uint8), state.chunks.dims.view(np.uint8)
        heats = None if placement is None else placement.heats
        if (
            row
            and (before := self._held[0])
            and before.page_bytes == self._settings.page_bytes
            and before.state.tobytes() == state.document
            and before.keys.tobytes() == state.chunks.keys
            and all(np.array_equal(old, new) for old, new in zip((before.chunks, before.dims), rows, strict=True))
            and save.has_pages_of(before)
            and np.array_equal(table_of(before).pages["heat"], np.zeros(save.pages) if heats is None else heats)
        ):
            save.refer(row)
            return
        save.write_manifest(
            page_bytes=self._settings.page_bytes,
            chunks=rows[0],
            dims=rows[1],
            keys=state.chunks.keys,
            state=state.document,
            heats=heats,
        )

    # Committing

    def _commit(self, parts: Sequence[bytes]) -> bytes:
        """On rank 0, when all are durable."""
        assert self._save is not None
        totals = [struct.unpack("<QQ", part[_ROW_BYTES:]) for part in parts]
        done = self._around.committed(
            self._save,
            step=self._draft.step,
            meta=encode_meta(self._draft.meta | {"io": io_of(self._around.native(), self._moved)}),
            tags=[tag.encode("utf-8", "surrogatepass") for tag in self._draft.tags],
            rows=b"".join(part[:_ROW_BYTES] for part in parts),
            raw_bytes=sum(raw for raw, _ in totals),
            written_bytes=sum(written for _, written in totals),
        )
        self._done = done
        names = ("id", "txid", "lsn", "parent", "time", "raw_bytes", "written_bytes", "tags", "note", "io")
        told = {name: getattr(done, name) for name in names}
        return json.dumps({"commit": told, "metrics": self._draft.meta["metrics"]}).encode()

    def _committed(self, told: dict[str, Any]) -> Commit:
        """What rank 0 has committed; metrics, tags and note are those of its call."""
        assert self._save is not None
        self._save.done()
        known = told["commit"] | {"tags": tuple(told["commit"]["tags"])}
        return Commit(
            step=self._draft.step,
            source=None,
            superseded=False,
            head=True,
            metrics=metrics_of(told),
            ranks=self._job.ranks,
            **known,
        )


def _clash(replicas: Sequence[dict[str, str]]) -> list[str]:
    """The groups of replicas of which two ranks have different bytes."""
    first: dict[str, str] = {}
    return sorted(
        {label for there in replicas for label, digest in there.items() if first.setdefault(label, digest) != digest}
    )


def _explain(job: Job, about: Description, clash: Sequence[str]) -> None:
    """Finds the keys whose replicas differ.

    Raises:
        RanksDisagree: Always.
    """

    def compare(parts: Sequence[bytes]) -> bytes:
        first: dict[str, tuple[int, str]] = {}
        differences: dict[str, None] = {}
        for rank, part in enumerate(parts):
            for key, digest in json.loads(part).items():
                before, other = first.setdefault(key, (rank, digest))
                if other != digest:
                    name = key.partition(":")[2]
                    differences[f"{name!r} on rank {rank} is not what its replica on rank {before} is"] = None
        raise RanksDisagree(
            "tensors that ranks hold as replicas have different bytes, so nothing was written",
            differences=[*differences],
        )

    mine = {f"{label}:{key}": digest for label, key, digest in about.replica_digests() if label in clash}
    job.channel.round("comparing replicas", json.dumps(mine).encode(), compare)
