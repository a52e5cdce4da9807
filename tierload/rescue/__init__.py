"""Rescue reader: turns one commit of a tierload store into a safetensors file.

Written from docs/FORMAT.md alone and on purpose independent of the engine: it imports nothing else of tierload and no
torch. A copy of this folder runs anywhere (`python -m rescue STORE --to OUT.safetensors`), as `python -m
tierload.rescue` does. It only reads. It distrusts what it reads: offsets, lengths and counts are checked against the
file that holds them before anything is allocated.
"""

from .report import Damage, Refused, Report
from .store import commits, read

__all__ = ["Damage", "Refused", "Report", "commits", "read"]
