"""Checking a compiled model against PyTorch, layer by layer."""

from bessemer.verify.api import verify
from bessemer.verify.report import Check, Report

__all__ = ["Check", "Report", "verify"]
