"""B56: tensors far beyond 2 and 4 GiB, by the arithmetic alone: files without content are mapped, nothing is read.

That the bytes arrive too is shown by the slow tests of tests/cases/test_large.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_engine import table
from odd_tensors import Scaled

from tierload.errors import CorruptStore
from tierload.layout import plan_pages
from tierload.state import flatten, plan_bind, plan_load
from tierload.state.footprints import footprint_of
from tierload.types import ChunkInfo, FlatState

GIB = 1 << 30
PAGE = 16 << 20

pytestmark = [pytest.mark.filterwarnings("ignore:.*(quantiz|nested|Sparse CSR|Sparse invariant)")]


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """Half a TiB of memory that nobody has touched."""
    size = 512 * GIB
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(size)
    return torch.from_file(str(tmp_path / "hole"), shared=True, size=size, dtype=torch.uint8)


def check_pages(flat: FlatState) -> None:
    """Every byte of every chunk is in one page, at its address."""
    plan = plan_pages(flat, PAGE, 0)
    part = 0
    for chunk in flat.chunks.infos():
        row = plan.rows[chunk.number]
        assert row["bytes"] == chunk.nbytes
        assert row["pages"] == -(-chunk.nbytes // PAGE)
        assert row["first_page"] == part
        parts = slice(part, part + int(row["pages"]))
        assert int(plan.lengths[parts].sum()) == chunk.nbytes
        apart = chunk.number in flat.strides
        starts = plan.part_offsets[parts] if apart else plan.pointers[parts] - flat.pointers[chunk.number]
        assert starts.tolist() == list(range(0, chunk.nbytes, PAGE))
        part = parts.stop
    assert part == len(plan.parts_of_page) == len(plan.lengths)


def places(flat: FlatState, memory: torch.Tensor) -> dict[str, tuple[int, int]]:
    """Where in the memory each chunk begins, and how many bytes it has."""
    pointers = flat.pointers.tolist()
    return {each.key: (pointers[each.number] - memory.data_ptr(), each.nbytes) for each in flat.chunks.infos()}


@pytest.mark.parametrize("nbytes", [2 * GIB - 8, 2 * GIB, 4 * GIB - 8, 4 * GIB, 4 * GIB + 8, 512 * GIB], ids=hex)
def test_one_tensor(mapped: torch.Tensor, nbytes: int) -> None:
    for dtype in (torch.uint8, torch.bfloat16, torch.float64):
        flat = flatten({"w": mapped[:nbytes].view(dtype)})
        (chunk,) = flat.chunks.infos()
        assert (chunk.nbytes, chunk.sizes) == (nbytes, (nbytes // dtype.itemsize,))
        assert places(flat, mapped) == {"w": (0, nbytes)}
        check_pages(flat)


def test_parts_and_overlaps(mapped: torch.Tensor) -> None:
    words = mapped.view(torch.int32).view(-1, 1024)
    state = {
        "all": words[: 1 << 22],
        "tail": words[(1 << 22) - 3 : 1 << 22, 5:],
        "turned": words[: 1 << 22].t(),
        "far": words[1 << 26 :][: 1 << 21],
        "far part": words[(1 << 26) + 7],
        "gaps": words[1 << 24 : 1 << 25, ::3],
    }
    flat = flatten(state)
    sizes = places(flat, mapped)
    assert sizes["all"] == (0, 16 * GIB)
    assert sizes["far"] == (256 * GIB, 8 * GIB)
    assert sizes["gaps"] == (64 * GIB, (1 << 24) * 342 * 4)
    assert len(flat.chunks) == 3
    check_pages(flat)
    assert f'"offset":{((1 << 22) - 3) * 1024 + 5}'.encode() in flat.document
    plan = plan_load(flat.document, flat.chunks, keys=["tail"])
    assert flat.chunks.nbytes[plan.destinations.chunks].tolist() == [16 * GIB]


def test_into_a_target(mapped: torch.Tensor) -> None:
    words = mapped.view(torch.int16)
    saved = flatten({"a": words[: 3 * GIB], "b": words[4 * GIB : 8 * GIB].view(2, -1)})
    target = {"a": words[16 * GIB :][: 3 * GIB], "b": words[32 * GIB :][: 4 * GIB].view(2, -1)}
    plan = plan_bind(saved.document, saved.chunks, target)
    assert saved.chunks.nbytes[plan.destinations.chunks].tolist() == [6 * GIB, 8 * GIB]
    assert [pointer - mapped.data_ptr() for pointer in plan.destinations.pointers.tolist()] == [32 * GIB, 64 * GIB]
    assert plan.in_place == {0, 1}


def test_compound_tensors(mapped: torch.Tensor) -> None:
    values = mapped[: 6 * GIB].view(1, -1)
    quantized = torch._empty_affine_quantized((1,), scale=0.5, zero_point=1, dtype=torch.qint8)
    quantized.set_(mapped.untyped_storage(), 5 * GIB, (3, 4 * GIB), (4 * GIB, 1))
    state = {
        "coo": torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), values, (2, 6 * GIB)),
        "csr": torch.sparse_csr_tensor(
            torch.tensor([0, 1]), torch.tensor([0]), mapped[100 * GIB : 105 * GIB].view(1, -1), (1, 1, 5 * GIB)
        ),
        "quantized": quantized,
        "subclass": Scaled(mapped[200 * GIB : 209 * GIB].view(9, GIB), torch.ones(9)),
    }
    flat = flatten(state)
    found = places(flat, mapped)
    assert found["coo/~.values"] == (0, 17 * GIB), "the integers of the quantized one begin inside the sparse values"
    assert found["csr/~.values"] == (100 * GIB, 5 * GIB)
    assert found["subclass/~.inner"] == (200 * GIB, 9 * GIB)
    check_pages(flat)
    assert f'"stride":[{4 * GIB},1],"offset":{5 * GIB}'.encode() in flat.document


def test_shapes_without_memory() -> None:
    """What a document may say is checked with whole numbers, and refused before memory is asked for."""
    for shape in ([1 << 40, 1 << 22], [1 << 62, 4], [1 << 33, 1 << 31]):
        document = f'{{"version":1,"root":{{"t":{{"chunk":0,"shape":{shape}}}}}}}'.encode()
        info = ChunkInfo(0, "", 12, tuple(shape), (0, 0), tuple(shape), (shape[0] * shape[1] * 4) % (1 << 64))
        with pytest.raises((CorruptStore, MemoryError)):
            plan_load(document, table([info]))
    print_of = footprint_of(1 << 46, (1 << 20, 1 << 15), (1 << 16, 2), 4)
    assert print_of.span == ((1 << 20) - 1) * (1 << 18) + ((1 << 15) - 1) * 8 + 4
    assert print_of.nbytes == 1 << 37
