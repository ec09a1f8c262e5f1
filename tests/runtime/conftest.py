"""Fixtures of the runtime's tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from bessemer.runtime.tokenizer import Tokenizer

# Other work on the machine must not fail a test: no deadline for one example.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SmolLM2's tokenizer, from the GGUF file that its Python package holds."""
    from bessemer.importer.checkpoint import open_checkpoint

    folder = tmp_path_factory.mktemp("smollm2-tokenizer")
    checkpoint = open_checkpoint("smollm2")
    try:
        checkpoint.write_tokenizer(folder)
    finally:
        checkpoint.close()
    return Tokenizer.load(folder)
