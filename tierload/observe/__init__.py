"""What people see of work that goes on. It knows nothing of the rest: it is given numbers and texts."""

from tierload.observe.progress import Progress, say, size

__all__ = ["Progress", "say", "size"]
