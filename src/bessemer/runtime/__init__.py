"""Running a compiled model: library, weights, sessions, sampling, text.

Imports numpy, tokenizers and jinja2, and neither torch nor MLIR.
"""
