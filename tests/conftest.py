"""What all tests share: see `tests.sharing`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.sharing import shared_objects

# Test processes share the machine's cores, and the matrices are tiny: threads of PyTorch and NumPy
# would only wait for one another. Bessemer's own threads are not of these libraries.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A shell ignores Ctrl-C for what it runs in the background, and children inherit that; the tests
# that interrupt something would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def objects_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each object is compiled once a run, in whatever worker."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if base.name.startswith("popen-") else base
    with shared_objects(run / "shared"):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of an architecture, whatever room they are in, come one after the other, so that
    one process imports it once for all of them; so do those of the real model. They take longest,
    and come first.
    """
    models = sys.modules.get("tests.tiny_models")
    if models is None:
        return
    places = {name: place for place, name in enumerate(models.ARCHITECTURES)}

    def place(item: pytest.Item) -> int:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        named = (parameters.get(key) for key in ("name", "model_type"))
        found = [places[name] for name in named if isinstance(name, str) and name in places]
        if "smollm2" in item.path.name and item.get_closest_marker("slow"):
            found.append(-1)
        return found[0] if found else len(places)

    items.sort(key=place)
