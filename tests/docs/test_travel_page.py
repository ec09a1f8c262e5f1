"""docs/a-model-on-its-way.md can be made anew, and has every stage."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.docs.how_to import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("travel", ROOT / "docs" / "make_travel_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "travel", module)
        spec.loader.exec_module(module)
    return module


def sections(page: str) -> dict[str, str]:
    """Titles without their numbers, and what stands under them."""
    parts = re.split(r"^## \d+\. (.*)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# What each section must show of the real thing.
SHOWN = {
    "PyTorch": r"LlamaRMSNorm\(\(32,\), eps=1e-06\)",
    "ATen": r"aten\.rsqrt\.default\(%\w+\) : float32\[1, s\d+, 1\]",
    "The imported graph": r"attention\(.*\{layer = 0.*// model\.layers\.0\.self_attn \(\S+:\d+\)",
    "The passes": r"recognise +rms_norm .*rms_norm \+13",
    "The lowered graphs": r"linear\(.*\) \{has_residual = true\} : f32\[T, 32\]",
    "Groups": r"5 times:\n(?:  [ |] decode_\w+\n)+",
    "A payload": r"func\.func @decode_generic_0\(.*tensor<[^}]*linalg\.generic",
    "A kernel": r"vector\.reduction <add>, %\w+ : vector<8xf32> into f32",
    "The main graph": r"func\.call @decode_rms_norm_0\(",
    "LLVM IR": r"load <8 x float>, ptr",
    "Assembly": r"vmulps .*%ymm\d",
    "The artifact": r"_mlir_ciface_forward_decode\n[^`]*bsm_pool_create",
    "The numbers": r"prefill 7 +ok +relative L2 \d",
}


@pytest.mark.slow
def test_the_page_can_be_made(script: ModuleType, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        page = script.make_page()
    finally:
        torch.set_num_threads(before)
    found = sections(page)
    assert list(found) == list(script.STAGES) == list(SHOWN)
    for title, pattern in SHOWN.items():
        assert re.search(pattern, found[title]), f"{title}:\n{found[title]}"
    assert "FAILED" not in page
    assert str(tmp_path.parent) not in page


def test_the_page_that_is_there_has_every_stage(script: ModuleType) -> None:
    found = sections(script.PAGE.read_text(encoding="utf-8"))
    assert list(found) == list(script.STAGES)
    for title, pattern in SHOWN.items():
        assert re.search(pattern, found[title]), f"{title} is out of date"
