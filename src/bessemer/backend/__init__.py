"""MLIR to machine code: the pass pipelines, LLVM code generation, targets and linking."""
