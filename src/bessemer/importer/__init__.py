"""Checkpoints and modules in, graphs out. The only room that imports torch and transformers.

Those two are imported on first use of the names below, so that reading a checkpoint
(`bessemer.importer.checkpoint`) does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bessemer.importer.api import Imported, import_model
    from bessemer.importer.reference import reference_logits

from bessemer.importer.architectures import SUPPORTED, UNSUPPORTED

__all__ = ["SUPPORTED", "UNSUPPORTED", "Imported", "import_model", "reference_logits"]


def __getattr__(name: str) -> Any:
    if name == "reference_logits":
        from bessemer.importer import reference

        return reference.reference_logits
    if name in ("Imported", "import_model"):
        from bessemer.importer import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
