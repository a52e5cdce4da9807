"""Pages of chunks: pure geometry. How chunks are cut into pages and packed, and where a chunk's bytes lie in them."""

from tierload.layout.pages import PagePlan, plan_pages
from tierload.layout.tables import ManifestTable, ReadPlan, segment_sizes

__all__ = ["ManifestTable", "PagePlan", "ReadPlan", "plan_pages", "segment_sizes"]
