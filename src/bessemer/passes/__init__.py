"""Named rewrites from the imported graph to the graphs that code is generated for."""

from bessemer.passes.base import Pass, RulePass
from bessemer.passes.pipeline import (
    Lowered,
    PassOptions,
    PassRecord,
    every_pass,
    lower,
    pass_by_name,
    run_passes,
)

__all__ = [
    "Lowered",
    "Pass",
    "PassOptions",
    "PassRecord",
    "RulePass",
    "every_pass",
    "lower",
    "pass_by_name",
    "run_passes",
]
