"""How an open store loads: at once, lazily, in parts, or while what is loaded is used already."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tierload.engine import devices
from tierload.engine.company import company_of
from tierload.engine.direct import choose_way
from tierload.engine.heating import heat_in
from tierload.engine.hot_start import HotOptions, HotStart, Stage
from tierload.engine.job import place
from tierload.engine.loading import Source, Whole, devices_of_plan, fill
from tierload.engine.opened import OpenStore
from tierload.engine.pinned import PinnedPages, pinned
from tierload.engine.reading import CommitReader
from tierload.engine.shards import Shards
from tierload.errors import InvalidRequest
from tierload.gds import Choice
from tierload.state import Outline, plan_bind, plan_hot, plan_lazy, plan_load
from tierload.types import Commit, LoadReport

if TYPE_CHECKING:
    import torch

__all__ = ["LoadingStore"]


class LoadingStore(OpenStore):
    """What ``Store`` does for those of its methods that load; see there."""

    _chosen_way: Choice | None = None

    def load(
        self,
        *,
        step: int | None = None,
        commit: str | Commit | None = None,
        tag: str | None = None,
        into: object = None,
        strict: bool = True,
        cast: bool = False,
        keys: str | Sequence[str] | None = None,
        types: Sequence[type] = (),
        allow_pickle: bool = False,
        rank: int | None = None,
        together: bool | None = None,
        lazy: bool = False,
    ) -> object:
        """Loads a commit (the head) and verifies every byte of it: returns the state, or fills ``into`` in place and
        returns a ``LoadReport``.

        Of a state that ranks saved together every rank reads what its own target needs, whatever the number of ranks
        was; without a target, tensors that were spread over ranks are whole. Values that each rank had of its own are
        those of this rank, or of ``rank``; where fewer ranks saved than load, they are dealt out again from rank 0 on.

        ``keys`` are patterns (``*``, ``?``); only pages that hold matching keys are read. ``cast`` allows conversion
        between floating dtypes. ``types`` are the dataclasses, named tuples, enums and tensor subclasses that may
        be rebuilt. In a target, a sparse tensor gets new indices and values and a nested one is exchanged, both staying
        the same objects; the memory of all others is overwritten (docs/decisions/0009).

        Where torch.distributed is initialised and ``into`` has tensors that are spread over all ranks, or over one set
        of them, these load ``together``: each has to call this, ranks of one node read each page once between them, and
        an error of one is raised on all of these. True: also without such a target, by all ranks of the job; False:
        this rank reads by itself.

        ``lazy``: the state has a ``LazyTensor`` for each tensor, which is read, and verified, when it is used:
        ``state["emb"][a:b]`` and ``state["emb"][rows]`` read the pages that they need and no others, and give a tensor
        of their own; of a stored view of something, all of it is read. Shapes and dtypes are known without. Any other
        use reads the whole, once: ``materialise()`` is the tensor that a load gives. Other values are read at once, and
        so are tensors that are made of others (sparse, quantized, nested, subclasses). The commit stays readable until
        all is read or gone, whatever becomes of the store, also for processes that are forked or sent lazy tensors
        (workers of data loaders); a pickle, a copy and a save hold the values.

        Raises:
            KeyMismatch: ``into`` differs from what is stored: everything is listed, and nothing was changed.
            CorruptPage: A page is damaged; the error says where, and which keys of ``into`` had been overwritten.
                Of a lazy tensor, it is raised by the use that needs the page.
            InvalidRequest: ``lazy`` with ``into`` or ``together``.
        """
        if lazy and (into is not None or together):
            raise InvalidRequest("lazy=True reads tensors one by one when they are used: leave out into= and together=")
        self._wait_for_background()
        patterns = [keys] if isinstance(keys, str) else keys
        here, ranks = place()
        if lazy:
            whose = here if rank is None else rank
            source = pinned(self._source(step, commit, tag, whose, ranks))
            find = partial(_find_pinned, os.path.abspath(self.path), source.commit.id, whose, ranks)
            pages = PinnedPages(source, find, self._threads, here)
            lazily = plan_lazy(source.document, pages, keys=patterns, types=types, allow_pickle=allow_pickle)
            pages.read(lazily)
            return lazily.finish()
        holders: set[tuple[int, ...]] = set()  # of tensors in the target
        try:
            source = self._source(step, commit, tag, here if rank is None else rank, ranks)
            if into is None:
                plan = plan_load(source.document, source.chunks, keys=patterns, types=types, allow_pickle=allow_pickle)
            else:
                plan = plan_bind(
                    source.document,
                    source.chunks,
                    into,
                    strict=strict,
                    cast=cast,
                    keys=patterns,
                    types=types,
                    allow_pickle=allow_pickle,
                    holders=holders,
                    whole=source.whole,
                )
        except BaseException as error:
            company = company_of(self.settings, together, holders)
            if company is not None:
                company.refuse(error)
            raise
        company = company_of(self.settings, together, holders)
        io = self.io
        if company is not None:
            company.fill(source, plan, self._threads)
        elif devices_of_plan(plan):
            way = self._way()
            io = f"{io}; GPU: {way.why}"
            fill(source, plan, self._threads, here, self.path if way.load == "gds" else None)
        else:
            fill(source, plan, self._threads, here)
        result = plan.finish()
        return replace(result, io=io) if isinstance(result, LoadReport) else result

    def _way(self) -> Choice:
        """Which way goes what accelerators have."""
        if self._chosen_way is None:
            self._chosen_way = choose_way(self.path, devices.remembered(self.path) or devices.UNKNOWN)
        return self._chosen_way

    def hot_start(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int | None = None,
        commit: str | Commit | None = None,
        tag: str | None = None,
        into: object = None,
        key: str | None = None,
        keys: str | Sequence[str] | None = None,
        example: tuple[Any, ...] | Mapping[str, Any] | None = None,
        strict: bool = True,
        cast: bool = False,
        types: Sequence[type] = (),
        allow_pickle: bool = False,
        rank: int | None = None,
        progress: bool = False,
        began: float | None = None,
    ) -> HotStart:
        """Loads a commit (the head) into ``model`` and ``optimizer`` while they are used already: it returns at once,
        and the first use of a tensor waits for that one. See ``HotStart``.

        The model is looked for in the stored state by the names of its tensors, or is at ``key``; ``into`` is a whole
        target, as ``load`` takes it with ``keys``, in which ``model`` (or the first module) is needed first. Tensors
        arrive in the order in which a forward pass uses them: as an ``example`` of its arguments shows (nothing is
        computed), as the commit's heat recorded it, else as modules are registered. States of optimizers come last.

        Tensors on meta get their memory. A buffer on meta that is in no state dict has to be computed before, which is
        an error. Tensors that cannot be made to wait are there when it returns: those that are spread over ranks,
        subclasses, modules in TorchScript or with a loading of their own.

        Raises:
            KeyMismatch: Store and target differ: everything is listed, and nothing was changed.
            CorruptPage: Of what has to be there at once. Later, it is raised by the use that needs the page.
            InvalidRequest: There is neither ``model`` nor ``into``.
        """
        if model is None and into is None:
            raise InvalidRequest("say what to hot start: a model, or a whole target (into=)")
        began = time.perf_counter() if began is None else began
        self._wait_for_background()
        here, ranks = place()
        whose = here if rank is None else rank
        source = pinned(self._source(step, commit, tag, whose, ranks))
        find = partial(_find_pinned, os.path.abspath(self.path), source.commit.id, whose, ranks)
        pages = PinnedPages(source, find, self._threads, here)
        rows = sum(len(source.table(holder).pages) for holder in range(source.commit.ranks))
        opened = Stage("open", time.perf_counter() - began, f"{rows} pages of {source.commit.ranks} shards, verified")
        start = time.perf_counter()
        plan = plan_hot(
            source.document,
            source.chunks,
            (model, optimizer) if into is None else into,
            key=key,
            keys=[keys] if isinstance(keys, str) else keys,
            strict=strict,
            cast=cast,
            types=types,
            allow_pickle=allow_pickle,
            whole=source.whole,
        )
        heat = heat_in(source.commit, source.manifest(0))
        options = HotOptions(model, example, heat, self.settings.hot_budget_bytes, progress)
        return HotStart(source, plan, pages, opened, options, self._threads, here, start)

    def reader(
        self,
        *,
        step: int | None = None,
        commit: str | Commit | None = None,
        tag: str | None = None,
        types: Sequence[type] = (),
        allow_pickle: bool = False,
        rank: int | None = None,
    ) -> CommitReader:
        """What a commit (the head) holds, without its bytes, and with what is needed to read parts of it. The options
        are those of ``load``.

        Raises:
            CorruptStore: Its metadata is damaged.
        """
        self._wait_for_background()
        here, ranks = place()
        source = self._source(step, commit, tag, here if rank is None else rank, ranks)
        outline = Outline(source.document, source.chunks, types=types, allow_pickle=allow_pickle)
        return CommitReader(source, outline, threads=self._threads, rank=here)

    def _source(self, step: int | None, commit: str | Commit | None, tag: str | None, rank: int, ranks: int) -> Source:
        """A commit's shards, and its state as ``rank`` of ``ranks`` sees it."""
        with self._lock:
            if step is None and commit is None and tag is None:
                found = self._newest_whole()
            else:
                found = self._view().find(step=step, commit=commit, tag=tag)
            manifest = self._manifest(found)
        if found.ranks == 1:
            return Whole(found, manifest)
        return Shards(found, partial(self._manifest, found), rank=rank, ranks=ranks)

    def _newest_whole(self) -> Commit:
        """The head, or when its metadata is damaged, the newest commit of its line that is whole, with a warning."""
        view = self._view()
        head = view.find()
        if self._native.head_damage:
            problems = {txid: self._native.check_commit(txid) for txid in view.line.positions}
            whole = next((view[txid] for txid, problem in problems.items() if not problem), head)
            if whole != head:
                skipped = "; ".join(
                    f"{view[txid].id[:12]} (step {view[txid].step}): {problem}"
                    for txid, problem in problems.items()
                    if problem and txid > whole.txid
                )
                warnings.warn(
                    f"{self.path}: loading commit {whole.id[:12]} (step {whole.step}), since newer ones are damaged: "
                    f"{skipped}. `tierload rollback` makes it the head",
                    stacklevel=4,
                )
                return whole
        return head

    def _wait_for_background(self) -> None:
        """What a writer has begun is part of what there is to load; a reader sees what was durable when it opened."""


def _find_pinned(path: str, commit: str, rank: int, ranks: int) -> Source:
    """A commit for a process that knows no more than where it is."""
    with LoadingStore(path) as store:
        return pinned(store._source(None, commit, None, rank, ranks))
