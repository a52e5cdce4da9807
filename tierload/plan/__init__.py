"""Who holds, writes and needs which part of a tensor that many ranks share: pure geometry, without torch."""

from tierload.plan.boxes import copies, overlap
from tierload.plan.meshes import LocalBox, holders, is_in, local_boxes, local_elements, local_shape, replica
from tierload.plan.writers import Cost, Explanation, Item, Part, assign_writers, explain

__all__ = [
    "Cost",
    "Explanation",
    "Item",
    "LocalBox",
    "Part",
    "assign_writers",
    "copies",
    "explain",
    "holders",
    "is_in",
    "local_boxes",
    "local_elements",
    "local_shape",
    "overlap",
    "replica",
]
