"""What exists and what is current: commits, their order, what a name means, what may be dropped.

A thin face of the native catalog, which is the only implementation of commit, recovery and collection.
"""

from tierload.catalog.line import Line
from tierload.catalog.retention import choose_dropped, parse_best
from tierload.catalog.text import decode_text
from tierload.catalog.view import CatalogView

__all__ = ["CatalogView", "Line", "choose_dropped", "decode_text", "parse_best"]
