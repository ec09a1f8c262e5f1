"""Every function of the C API with nothing in each place: a program, since a fault would end it.

    python -m tests.embedding.null_calls FOLDER

Prints what the functions that return a status gave: `null` with nothing at all, `handle` with a
handle alone.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import sys
from pathlib import Path

from bessemer.native import public_functions, public_header
from tests.embedding.c_api import Api, CModel

MOST_ARGUMENTS = 7
STATUS = re.compile(r"^BSM_API bsm_status (bsm_\w+)\(", re.MULTILINE)
OF_A_HANDLE = re.compile(r"^BSM_API\b[^;(]*?\b(bsm_\w+)\((?:const )?(bsm_\w+) \*", re.MULTILINE)
ENDING = {"bsm_close", "bsm_session_destroy", "bsm_sampler_destroy"}


def main(folder: Path) -> None:
    path = folder / "model.so"
    library, model = ctypes.CDLL(str(path)), CModel(Api(path), folder, threads=2)
    session, sampler, nothing = model.session(), ctypes.c_void_p(), [None] * MOST_ARGUMENTS
    statuses = set(STATUS.findall(public_header()))
    called = {name: getattr(library, name)(*nothing) for name in sorted(public_functions())}
    # A range that isn't empty, of no work; and options that aren't there are the defaults.
    library.bsm_parallel_for(None, ctypes.c_int64(0), ctypes.c_int64(9), None, None, None)
    vocab = ctypes.c_int64(session.vocab)
    assert library.bsm_sampler_create(None, vocab, ctypes.byref(sampler), None) == 0
    session.prefill([1, 2])
    handles = {"bsm_model": model.handle, "bsm_session": session.handle, "bsm_sampler": sampler}
    given = {
        name: getattr(library, name)(handles[kind], *nothing[1:])
        for name, kind in OF_A_HANDLE.findall(public_header())
        if kind in handles and name not in ENDING
    }
    library.bsm_sampler_uniform.restype = ctypes.c_double
    assert math.isnan(library.bsm_sampler_uniform(None))
    print(
        json.dumps(
            {
                "null": {name: called[name] for name in statuses},
                "handle": {name: given[name] for name in statuses & set(given)},
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
