"""How the ranks of one job speak: rounds over torch's key-value store, beside the training's own traffic. No torch."""

from tierload.ranks.board import Board, KeyValueStore, StoreUnreachable
from tierload.ranks.channel import Channel

__all__ = ["Board", "Channel", "KeyValueStore", "StoreUnreachable"]
