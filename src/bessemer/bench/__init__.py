"""How fast a compiled model is, and how near to what the machine can do.

`run.bench` measures a model in a process of its own (`worker`), so that compiling leaves no trace
in its memory; `machine` measures the processor with two small compiled probes; `results` puts both
together. Nothing here asserts a speed.
"""
