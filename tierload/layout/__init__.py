"""Pages of chunks: pure geometry. How chunks are cut into pages and packed, and where a chunk's bytes lie in them."""

from tierload.layout.pages import PagePlan, plan_pages
from tierload.layout.placement import Placement, place_pages
from tierload.layout.rows import CHUNK_PACKED, ROOT_ROW
from tierload.layout.tables import ManifestTable, ReadPlan, segment_sizes

__all__ = [
    "CHUNK_PACKED",
    "ROOT_ROW",
    "ManifestTable",
    "PagePlan",
    "Placement",
    "ReadPlan",
    "place_pages",
    "plan_pages",
    "segment_sizes",
]
