"""Reading a checkpoint takes about one tensor of memory, however large the file is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .builders import hf_folder

ROWS, COLUMNS, COUNT = 2048, 2048, 12
TENSOR_MIB = ROWS * COLUMNS * 2 / 2**20

SCRIPT = """
import sys
from bessemer.importer.checkpoint import open_checkpoint

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024

with open_checkpoint(sys.argv[1]) as checkpoint:
    # The libraries' own pages are no matter of ours: read a small one first.
    checkpoint.read("small")
    before = peak()
    for name in checkpoint.names():
        getattr(checkpoint, sys.argv[2])(name)
    print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("method", "tensors"), [("read_stored", 3), ("read", 4)])
def test_peak_is_near_one_tensor(tmp_path: Path, method: str, tensors: int) -> None:
    weights = {f"w{index}": np.ones((ROWS, COLUMNS), np.float16) for index in range(COUNT)}
    folder = hf_folder(tmp_path / "m", weights | {"small": np.ones(4, np.float16)})
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), method],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert float(result.stdout) < tensors * TENSOR_MIB < COUNT * TENSOR_MIB / 2
