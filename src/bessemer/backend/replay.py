"""`python -m bessemer.backend.replay PIPELINE FILE`: run MLIR passes on a saved module.

Does what `mlir-opt --pass-pipeline=PIPELINE FILE` does, with the MLIR that Bessemer itself uses.
"""

from __future__ import annotations

import sys
from pathlib import Path


def replay(pipeline: str, path: Path) -> str:
    """The module in `path` after `pipeline`, as text. Raises mlir.ir.MLIRError."""
    import mlir.ir as ir
    from mlir.passmanager import PassManager

    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(path.read_text(encoding="utf-8"))
        PassManager.parse(pipeline).run(module.operation)
        return str(module)


def main(arguments: list[str]) -> int:
    """Command line: prints the resulting IR, or the error on standard error."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    import mlir.ir as ir

    try:
        print(replay(arguments[0], Path(arguments[1])))
    except (ir.MLIRError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
