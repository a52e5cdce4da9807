"""Other formats: a commit → safetensors, torch.save or DCP, and those → a commit, compared tensor by tensor."""

from tierload.convert.exporting import export_state
from tierload.convert.importing import import_state
from tierload.convert.report import ConvertReport

__all__ = ["ConvertReport", "export_state", "import_state"]
