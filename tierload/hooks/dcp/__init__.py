"""torch.distributed.checkpoint: ``Writer`` and ``Reader`` for its ``save``, ``async_save`` and ``load``.

What DCP calls a checkpoint is a commit of one store. It holds the nested state that was passed, not DCP's flat keys, so
``tierload.load``, ``rollback``, ``diff`` and ``export`` work on it; and what ``tierload.save`` has saved can be read by
``dcp.load``, with any planner, on any number of ranks.
"""

from tierload.hooks.dcp.reader import Reader
from tierload.hooks.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
