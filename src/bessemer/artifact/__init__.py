"""Artifacts: the folder that a compiled model is, how it is written, read and checked.

Nothing in this room imports torch, MLIR or LLVM.
"""
