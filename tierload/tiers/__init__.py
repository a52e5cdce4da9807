"""What a hot start goes by: the order of first use, urgency, cores for its workers, and memory that stays."""

from tierload.tiers.cores import WorkerCores, worker_cores
from tierload.tiers.graphs import of_export, of_trace
from tierload.tiers.locking import MemoryLock, lock_memory, unlock_memory
from tierload.tiers.order import first_uses, of_heat, of_modules
from tierload.tiers.steps import of_step
from tierload.tiers.urgency import UrgencyRule
from tierload.tiers.uses import FirstUse, ModuleCall, tensor_names

__all__ = [
    "FirstUse",
    "MemoryLock",
    "ModuleCall",
    "UrgencyRule",
    "WorkerCores",
    "first_uses",
    "lock_memory",
    "of_export",
    "of_heat",
    "of_modules",
    "of_step",
    "of_trace",
    "tensor_names",
    "unlock_memory",
    "worker_cores",
]
