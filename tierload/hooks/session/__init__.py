"""The plain training loop: it saves itself, resumes by itself, and ends when it is told to."""

from tierload.hooks.session.run import Session

__all__ = ["Session"]
