"""
The native core of tierload; docs/ARCHITECTURE.md says what belongs here.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, overload

import numpy
import numpy.typing
from numpy.typing import NDArray


class Accelerator:
    """See tierload/accelerator.h."""

    @property
    def name(self) -> str: ...

    @property
    def bytes_to_host(self) -> int:
        """Moved so far."""

    @property
    def bytes_to_device(self) -> int: ...

class FakeAccelerator(Accelerator):
    """For tests: memory of the processor's, in disguise."""

    @property
    def number(self) -> int: ...

    def allocate(self, nbytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """Memory of its own, which is there until the process ends."""

    def delay(self, seconds: float) -> None:
        """Before each piece of work of a lane's."""

    def fail_after(self, count: int) -> None:
        """So many more pieces of work; -1: never."""

def fake_accelerator() -> FakeAccelerator: ...

def accelerator(number: int) -> Accelerator:
    """Raises AcceleratorError where it cannot be used."""

def accelerator_refusal(number: int) -> str:
    """
    Why an accelerator cannot be used (CUDA's device d has the number d + 1); "" where it can.
    """

def fake_at(address: int) -> int:
    """The number of the fake accelerator of an address; 0: none."""

def pinned_use() -> tuple[int, int]:
    """Bytes of pinned memory that are held, and most at a time."""

def trim_pinned() -> None:
    """Gives pinned memory that is idle back to the system."""

class DeviceRate:
    """
    Bytes a second of one way to move data; see calibrate in tierload/device.h.
    """

    @property
    def direct(self) -> bool: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def write(self) -> float: ...

    @property
    def read(self) -> float: ...

def calibrate(directory: str, seconds: float) -> list[DeviceRate]: ...

class RecordWriter:
    """Makes small records durable, one at a time; see tierload/device.h."""

    def write(self, count: int) -> list[int]:
        """Nanoseconds of each of the next records."""

def record_writer(path: str, *, flush: str, grows: bool, direct: bool, ring: bool, record_bytes: int, records: int) -> RecordWriter: ...

def in_memory(directory: str) -> bool: ...

def io_uring_refusal() -> str: ...

class Arrivals:
    """
    Units of bytes that arrive in the background, by urgency; see tierload/arrivals.h.
    """

    def __init__(self, manifests: list, manifest_of_part: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], pointers: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], units: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], ranks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], threads: int, devices: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, streams: Sequence[tuple[int, int]] = []) -> None: ...

    def work(self) -> None:
        """
        Works until everything has arrived; threads call it, as many as were announced.
        """

    def stop(self) -> None: ...

    def release(self) -> None:
        """
        Lets go of files and buffers, when everything has arrived and every work() has returned.
        """

    def order(self, units: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], ranks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def demand(self, unit: int) -> None: ...

    def wait(self, unit: int, seconds: float) -> bool:
        """Whether a unit has arrived within the time; raises CorruptPage."""

    def arrived(self, unit: int) -> bool: ...

    def next(self, seconds: float) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """
        Units that have arrived or failed since it was last asked; waits for one.
        """

    def failures(self) -> list[tuple[int, int, str, int, str]]:
        """
        Unit, page, path, offset and what is wrong, of each unit that is damaged.
        """

    @property
    def over(self) -> bool: ...

    @property
    def bytes(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def queued(self) -> int: ...

def watch_termination(grace_seconds: float) -> None: ...

def terminating() -> bool: ...

def save_begins(id: int, what: str) -> None: ...

def save_ends(id: int) -> None: ...

def fail_exit() -> None: ...

def forgive_exit() -> None: ...

class LockReport:
    @property
    def locked(self) -> int: ...

    @property
    def refused(self) -> int: ...

    @property
    def reason(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def placing(self) -> str: ...

def lock_memory(addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], node: int | None) -> LockReport: ...

def unlock_memory(addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> LockReport: ...

class Faults:
    """Makes chosen storage calls of a store fail; for tests."""

    def __init__(self) -> None: ...

    def arm(self, at: int, kind: str = 'fail', code: int = 5, times: int = 1, op: str = '') -> None: ...

    def disarm(self) -> None: ...

    @property
    def calls(self) -> int: ...

    @property
    def hit(self) -> bool: ...

class Progress:
    """Raw bytes moved so far by the call that was given this object."""

    def __init__(self) -> None: ...

    @property
    def bytes(self) -> int: ...

def copy_runs(sources: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], targets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], threads: int) -> None:
    """
    Copies runs of bytes from addresses to addresses; see copy_runs in tierload/engine.h.
    """

class Manifest:
    """An open, verified manifest shard; rows are views of the mapped file."""

    @property
    def path(self) -> str: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def segments(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]: ...

    @property
    def pages(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]: ...

    @property
    def chunks(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]: ...

    @property
    def dims(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]: ...

    @property
    def keys(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]: ...

    @property
    def state(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]: ...

    def segment_path(self, arg: int, /) -> str: ...

    def find(self, key: bytes) -> int | None:
        """The number of the chunk with a key, as UTF-8, or None."""

    def key_of_page(self, arg: int, /) -> bytes:
        """The key, as UTF-8, of the first chunk that a page belongs to."""

    def read(self, pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], pointers: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], threads: int, touched: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], progress: Progress | None, devices: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, streams: Sequence[tuple[int, int]] = [], landed: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None:
        """
        Reads and verifies parts of pages into memory; see read_pages in tierload/engine.h.
        """

    def check(self, pages: numpy.typing.ArrayLike, threads: int, progress: Progress | None) -> list[tuple[int, str, int, str]]:
        """
        Verifies pages to the last byte; returns (page, path, offset, what) for each failure.
        """

def super_of(path: str) -> tuple[bytes, int] | None:
    """
    Id and newest epoch of the store in a directory, or None where there is none.
    """

class CommitRecord:
    """A commit as the journal holds it."""

    @property
    def txid(self) -> int: ...

    @property
    def parent(self) -> int: ...

    @property
    def source(self) -> int: ...

    @property
    def step(self) -> int | None: ...

    @property
    def rollback(self) -> bool: ...

    @property
    def lsn(self) -> int: ...

    @property
    def time(self) -> int: ...

    @property
    def raw_bytes(self) -> int: ...

    @property
    def written_bytes(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def id(self) -> str: ...

    @property
    def meta(self) -> bytes: ...

class CatalogState:
    """Commits, tags and values as they were once."""

    @property
    def head(self) -> int: ...

    @property
    def values(self) -> dict[bytes, bytes]: ...

    def encode(self) -> bytes: ...

class CollectResult:
    @property
    def removed_files(self) -> int: ...

    @property
    def freed_bytes(self) -> int: ...

    @property
    def pinned(self) -> int: ...

class Store:
    """An open store; see tierload/catalog.h, also for its threads."""

    def __init__(self, path: str, writable: bool, holder: str, take_over: bool, faults: Faults | None, journal_roll_bytes: int, block_bytes: int, depth: int) -> None: ...

    def close(self) -> None: ...

    @property
    def writable(self) -> bool: ...

    @property
    def stepped_down(self) -> str:
        """Why data goes through the page cache, or ''."""

    @property
    def direct_bytes(self) -> int: ...

    @property
    def id(self) -> bytes: ...

    @property
    def epoch(self) -> int: ...

    @property
    def poisoned(self) -> bool: ...

    @property
    def last_lsn(self) -> int: ...

    @property
    def warnings(self) -> list[str]: ...

    @property
    def damage(self) -> str: ...

    @property
    def head_damage(self) -> str: ...

    def check_commit(self, arg: int, /) -> str:
        """What is wrong with a commit's manifest or segments, or ''."""

    @property
    def free_bytes(self) -> int: ...

    @property
    def head(self) -> int: ...

    def commits(self) -> list[CommitRecord]: ...

    def tags(self) -> dict[bytes, int]: ...

    def values(self) -> dict[bytes, bytes]: ...

    def change(self, key: bytes, value: bytes | None, sync: bool) -> int: ...

    def tag(self, arg0: bytes, arg1: int, /) -> int: ...

    def rollback(self, arg0: CatalogState, arg1: bytes, /) -> CommitRecord: ...

    def collect(self, arg: Sequence[int], /) -> CollectResult: ...

    def history(self, after: int) -> list[tuple[int, str, int, bytes, object, object, int]]:
        """
        Records after an LSN, newest first: LSN, kind, time, key, before, after, txid.
        """

    def history_warnings(self) -> list[str]:
        """What is damaged in one copy of the older journals that are kept."""

    def state_at(self, lsn: int) -> CatalogState:
        """The catalog as it was at an LSN."""

    def manifest(self, txid: int, rank: int = 0) -> Manifest: ...

    def shard(self, row: bytes, ranks: int) -> Manifest:
        """The manifest that a row of a root pins."""

    def root(self, txid: int) -> bytes:
        """The rows of a commit's root, 64 bytes a rank, in rank order."""

    def manifest_path(self, txid: int, rank: int = 0) -> str: ...

    def check_manifests(self, txid: int) -> list[tuple[str, str, str]]:
        """
        What is damaged of a commit's root file and manifests: path, what is wrong with it, and with its mirror ('': nothing).
        """

    def segment_size(self, path: str) -> int | None: ...

class PageSet:
    """Pages to be saved; see tierload.layout.PagePlan."""

    @staticmethod
    def of(pointers: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], part_views: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], part_offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], views: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], parts_of_page: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], item_sizes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], floating: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], packed: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], order: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, hot: int = 0, devices: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> PageSet:
        """
        `order`: which page is placed first, and so on; the first `hot` of them are hot.
        """

    @property
    def staging_bytes(self) -> int:
        """What an arena needs to hold all of them."""

    @property
    def host_bytes(self) -> int:
        """The same for those of which no accelerator has a byte."""

    @property
    def clone_bytes(self) -> list[tuple[int, int]]:
        """What a clone needs of each accelerator, by its number."""

class Clone:
    """
    A copy of pages where they are, in accelerators' memory; see tierload/clone.h.
    """

    @overload
    def __init__(self, pages: PageSet, rooms: Sequence[tuple[int, int, int, int]]) -> None:
        """`rooms`: number, address, bytes and stream, of each accelerator."""

    @overload
    def __init__(self, earlier: Clone, rooms: Sequence[tuple[int, int, int, int]]) -> None:
        """The same pages again, into the same rooms."""

    def wait_done(self, seconds: float | None) -> bool:
        """Whether it is made."""

class Arena:
    """Memory that states are copied into; see tierload/staging.h."""

    def __init__(self, nbytes: int) -> None: ...

    @property
    def nbytes(self) -> int: ...

    def prefault(self, threads: int) -> None: ...

class Staging:
    """A copy of pages as they were at one moment; see tierload/staging.h."""

    def __init__(self, pages: PageSet, late: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], arena: Arena, clone: Clone | None = None, streams: Sequence[tuple[int, int]] = []) -> None: ...

    def copy_now(self, threads: int) -> None: ...

    def start(self) -> None: ...

    def help(self, threads: int) -> None: ...

    def wait_done(self, seconds: float | None) -> bool:
        """Whether nobody reads from the state any more."""

    def abandon(self) -> None: ...

    @property
    def complete(self) -> bool: ...

    @property
    def keeps_all(self) -> bool:
        """Whether every page is still here after it was written."""

    def places(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """
        The address of each page's copy; those of a chunk by itself lie together.
        """

    @property
    def raw_bytes(self) -> int: ...

    @property
    def copied_bytes(self) -> int: ...

def page_digests(pages: PageSet, threads: int) -> Annotated[NDArray[numpy.uint64], dict(shape=(None, None))]:
    """
    The raw digest of each page: low and high half. `threads` work beside the caller.
    """

class TokenBucket:
    """A cap on bytes a second, for saves one after the other."""

    def __init__(self, bytes_per_second: float) -> None: ...

class Cancel:
    """Ends a save on another thread, which raises SaveCancelled."""

    def __init__(self) -> None: ...

    def set(self) -> None: ...

    @property
    def is_set(self) -> bool: ...

class Save:
    """
    One rank's part of an attempt to commit; see Transaction in tierload/catalog.h, and RankWriter in tierload/shard.h for ranks other than 0.
    """

    def __init__(self, store: Store, ranks: int = 1) -> None: ...

    @staticmethod
    def of_rank(store: Store, *, epoch: int, txid: int, rank: int, ranks: int) -> Save:
        """
        The part of a rank other than 0 in an attempt that rank 0 has begun. `store` is open for reading.
        """

    @property
    def epoch(self) -> int: ...

    @property
    def txid(self) -> int: ...

    def write(self, pages: PageSet, staging: Staging | None, parents: Sequence[Manifest], compression: str, device_rate: float, read_rate: float, threads: int, segment_bytes: int, flush_interval_ms: int, bucket: TokenBucket | None, background: bool, cancel: Cancel | None, progress: Progress | None, direct: object | None = None) -> None:
        """
        `direct` writes raw pages that accelerators have: a function of a segment's path and a list of offset in the file, address and length.
        """

    def write_manifest(self, page_bytes: int, chunks: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], dims: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], keys: bytes, state: bytes, heats: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None: ...

    def refer(self, row: bytes) -> None:
        """
        Instead of write_manifest: the shard is the one that an earlier commit's root has in this row.
        """

    def has_pages_of(self, manifest: Manifest) -> bool:
        """
        Whether the pages that were written or referenced are those of another manifest, in the same order.
        """

    def flush(self) -> None:
        """
        Makes what was written durable, so that commit is short. A rank other than 0 writes nothing afterwards; raises StoreFenced there when another writer has the store.
        """

    @property
    def row(self) -> bytes:
        """
        What the commit's root will say of this rank, 64 bytes; of a rank other than 0 after flush.
        """

    def commit(self, step: int | None, meta: bytes, tags: Sequence[bytes], rows: bytes = ..., raw_bytes: int | None = None, written_bytes: int | None = None) -> CommitRecord:
        """
        Commits. With several ranks, `rows` are those of all of them in rank order, and the bytes are totals.
        """

    def done(self) -> None:
        """On a rank other than 0: the attempt was committed."""

    def abort(self) -> None:
        """
        Gives the attempt up, unless it is over. A rank other than 0 that has flushed leaves its files, which rank 0 removes: only rank 0 knows whether they were committed.
        """

    @property
    def compression(self) -> str:
        """What was chosen."""

    @property
    def pages(self) -> int: ...

    @property
    def raw_bytes(self) -> int: ...

    @property
    def written_bytes(self) -> int: ...

    @property
    def written_pages(self) -> int: ...

    @property
    def direct_pages(self) -> int: ...

    @property
    def segment_times(self) -> list[tuple[int, float]]:
        """
        Of each new segment: bytes, and seconds from its first byte until it was durable.
        """

    @property
    def late_segments(self) -> int: ...

    @property
    def throttled_seconds(self) -> float: ...

class Torch:
    """
    What the core asks torch about tensors; rows: dtype, code, bytes, floating, complex.
    """

    def __init__(self, tensor: type, parameter: type, dtypes: list[tuple[object, int, int, bool, bool]], exchange: object | None) -> None: ...

class GuardedMemory:
    """See native/bind/guarded.h."""

    def __init__(self, torch: Torch, tensors: list, least_bytes: int) -> None: ...

    def holds(self, starts: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...

    def changed(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """
        Start and end in memory of each tensor that was changed in place, or moved, since this was made.
        """

class ModuleState:
    """What state_dict() of a module gives; stands for it in a state."""

    @property
    def wrappers(self) -> list[tuple[str, str]]: ...

class ModuleRules:
    """Knows the state of ordinary modules; see native/bind/modules.h."""

    def __init__(self, torch: Torch, functions: dict[str, object], wrapper_of: Callable[[type], tuple[str, str] | None]) -> None: ...

    def state_of(self, module: object) -> ModuleState | None: ...

class TensorKeys:
    """Keys of the tensors of a state, by identity."""

    def __init__(self) -> None: ...

    def add(self, tensor: object, key: str) -> None: ...

    def add_module(self, state: ModuleState, key: str) -> None: ...

    def of(self, tensor: object) -> list[str]: ...

    def all(self) -> list[tuple[Any, str]]: ...

class OptimizerState:
    """
    What state_dict() of an optimizer gives; stands for its states in a state.
    """

    @staticmethod
    def of(groups: object, state: object, keys: TensorKeys) -> OptimizerState | None: ...

    @property
    def names(self) -> str: ...

    @property
    def groups(self) -> list[dict[str, object]]: ...

class ChunkOrder:
    """The chunks of a state, sorted by key."""

    @property
    def more(self) -> list[int]:
        """The number of chunk of each that is no leaf."""

    @property
    def twice(self) -> bytes | None:
        """A key that two chunks have."""

class StateWriter:
    """Walks a state that is being saved; see native/bind/state_writer.h."""

    def __init__(self, torch: Torch) -> None: ...

    def write(self, state: object | None, root: object, encode: object) -> None: ...

    def met(self, value: object | None) -> int: ...

    def count(self) -> None: ...

    def append(self, text: str) -> None: ...

    def hole(self) -> int: ...

    @property
    def leaves(self) -> int: ...

    def leaf(self, number: int) -> tuple[Any, str, int]: ...

    def shared(self, others: Sequence[tuple[int, int]]) -> list[int]:
        """
        Leaves whose memory another leaf or one of these ranges of addresses uses too.
        """

    def order(self, shared: Sequence[int], more: Sequence[bytes]) -> ChunkOrder: ...

    def alike(self, other: StateWriter) -> bool: ...

    def release(self) -> list[object]: ...

    def table(self, order: ChunkOrder, keys: list[bytes], dtypes: list[int], sizes: list[list[int]], nbytes: list[int]) -> tuple: ...

    def pointers(self, order: ChunkOrder, more: Sequence[int]) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...

    def devices(self, order: ChunkOrder, more: Sequence[int]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...

    def document(self, order: ChunkOrder, texts: Sequence[tuple[int, str]]) -> bytes: ...

class TensorTable:
    """Chunks, and tensors for them; see native/bind/tensor_table.h."""

    def __init__(self, torch: Torch, empty_like: object, dtypes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], ndims: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], dims_at: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], dims: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], nbytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def fill_dict(self, nodes: dict, into: dict, make: Callable) -> list: ...

    def fill_list(self, nodes: list, into: list, make: Callable) -> list: ...

    def fill_pairs(self, pairs: list, into: object, make: Callable) -> list | None: ...

    def bind(self, live: object, nodes: dict) -> list: ...

    def unbind(self, chunks: list[int], others: list[tuple[int, int]]) -> list[tuple[int, Any]]: ...

    def whole(self, chunk: int, make: Callable) -> object: ...

    def get(self, chunk: int) -> object: ...

    def put(self, chunk: int, tensor: object | None) -> None: ...

    def made(self) -> tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint8], list[object]]: ...

    def bound(self) -> tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint8], list[object]]: ...

def parse_nodes(document: bytes) -> object:
    """
    A JSON text in ASCII as dicts, lists and scalars; see native/bind/nodes.h.
    """

def inner_nodes(container: dict[str, object] | list[object]) -> list[tuple[object, object]]:
    """Key or index, and node, of the members that may hold others."""

def encode_page(raw: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], item_size: int, floating: bool) -> tuple:
    """
    The codec's number and the stored bytes, as compression="fast" has them.
    """

def decode_page(stored: bytes, codec: int, item_size: int, into: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

def tree_digest(data: bytes) -> tuple[int, int]: ...

def key_hashes(keys: bytes, lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
    """XXH3 of keys that stand back to back."""
