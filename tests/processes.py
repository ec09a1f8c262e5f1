"""Waiting for a state of another process, where a fixed delay fails on a busy machine."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path


def wait_for_library(process: subprocess.Popen, name: str = "model.so") -> None:
    """Return when `process` has mapped its model's library, or has ended. Linux only."""
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and name not in maps.read_text():
        time.sleep(0.01)
