"""`bessemer pull`: fetch a model from the hub."""

from __future__ import annotations

import json as json_format
from typing import Annotated

from cyclopts import Parameter

from bessemer.cli.options import Json


def pull(
    name: Annotated[
        str,
        Parameter(help="owner/name, owner/name/file.gguf, each with @revision; or an alias."),
    ],
    /,
    *,
    json: Json = False,
) -> int:
    """Fetch a model from the Hugging Face hub into its cache.

    Prints where it lies. Only what compiling needs is fetched; what is there already is not
    fetched again, and HF_HUB_OFFLINE and HF_HOME are respected.
    """
    from bessemer.importer.checkpoint import resolve

    path = resolve(name)
    print(json_format.dumps({"name": name, "path": str(path)}) if json else path)
    return 0
