"""Files to and from the memory of GPUs through kvikio: whether that works here, how fast it is, and who takes that way.

``tierload.gds.probe`` is not imported here: it runs as a process of its own.
"""

from tierload.gds.availability import absence, facts, refusal, version
from tierload.gds.choice import Choice, ProbeResult, choose
from tierload.gds.files import Extent, GdsFiles

__all__ = ["Choice", "Extent", "GdsFiles", "ProbeResult", "absence", "choose", "facts", "refusal", "version"]
