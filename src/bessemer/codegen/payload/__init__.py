"""Payloads: graph nodes as linalg on tensors, and the generic group functions made of them."""

from bessemer.codegen.payload import attention as attention
from bessemer.codegen.payload import compressed as compressed
from bessemer.codegen.payload.generic_group import GenericGroup, emit_generic_group
from bessemer.codegen.payload.payload import emit_payload
from bessemer.codegen.payload.rows import row_wise
from bessemer.codegen.payload.spec import PayloadSpec, Stored, group_operands

__all__ = [
    "GenericGroup",
    "PayloadSpec",
    "Stored",
    "emit_generic_group",
    "emit_payload",
    "group_operands",
    "row_wise",
]
