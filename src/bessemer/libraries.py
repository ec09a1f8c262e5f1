"""The last step of a compilation: objects to model.so, libmodel.a and model.h.

It comes after the weights are written, since a library knows which weight file is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.artifact.manifest import ARCHIVE_FILE, HEADER_FILE, LIBRARY_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from bessemer.artifact.manifest import RopeSwitch
    from bessemer.backend.target import Target
    from bessemer.codegen.description import Variant
    from bessemer.codegen.generate import Generated


@dataclass(frozen=True)
class Libraries:
    """Makes the libraries of one model. work: a folder for what lies between.

    name: of the model, in messages.  variants: what the code needs, the best first.  prefix: put
    before every global symbol.
    """

    generated: Generated
    name: str
    target: Target
    variants: Sequence[Variant]
    work: Path
    rope: RopeSwitch | None = None
    prefix: str = ""

    def native_objects(self) -> list[Path]:
        """The thread pool and the C API, compiled."""
        from bessemer.backend.link import compile_api, compile_native

        folder = self.work / "native"
        return [*compile_native(self.target, folder), *compile_api(self.target, folder)]

    def write(self, objects: Sequence[Path], folder: Path, weights_digest: str) -> Path:
        """Put the libraries and the header into an artifact whose weights are written; returns the
        object of the model's description, which is in them, too.

        objects: the model's own and the native ones.  weights_digest: the hash of weights.bin's
        table. Raises CompileError.
        """
        from bessemer.backend.link import archive, link_shared, prefix_symbols
        from bessemer.codegen.abi import emit_header

        description = self._describe(folder, weights_digest)
        objects = [*objects, description]
        if self.prefix:
            objects = prefix_symbols(objects, self.prefix, self.work / "renamed")
        link_shared(objects, folder / LIBRARY_FILE, self.target)
        (folder / LIBRARY_FILE).chmod(0o755)
        archive(objects, folder / ARCHIVE_FILE)
        header = emit_header(self.generated, self.name, self.prefix)
        (folder / HEADER_FILE).write_bytes(header.encode())
        return description

    def _describe(self, folder: Path, weights_digest: str) -> Path:
        """The object of the model's description."""
        from bessemer.backend.link import compile_c
        from bessemer.codegen.description import WeightFile, emit_description
        from bessemer.native import FOLDER

        size = (folder / WEIGHTS_FILE).stat().st_size
        text = emit_description(
            self.generated,
            self.name,
            self.target.triple,
            self.variants,
            WeightFile(weights_digest, size),
            self.rope,
        )
        source, out = self.work / "description.c", self.work / "description.o"
        source.write_bytes(text.encode())
        compile_c(source, out, self.target, [f"-I{FOLDER}"])
        return out
