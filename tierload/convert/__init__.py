"""Other formats: a commit → a safetensors or torch.save file, and such files → a commit, compared tensor by tensor."""

from tierload.convert.exporting import export_state
from tierload.convert.importing import import_state
from tierload.convert.report import ConvertReport

__all__ = ["ConvertReport", "export_state", "import_state"]
