"""Code generation: groups, memory plan, barriers and main graphs, as MLIR text."""
