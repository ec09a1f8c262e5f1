"""Typed SSA graphs: types, op schemas with NumPy references, printer, parser, verifier."""

from bessemer.graph.core import Graph, Node, TensorType, Value, topological
from bessemer.graph.dims import Dim, Shape, Size
from bessemer.graph.dtypes import DType
from bessemer.graph.evaluate import evaluate, evaluate_node, evaluate_value
from bessemer.graph.parser import parse_graph
from bessemer.graph.parts import evaluate_rows, splits
from bessemer.graph.printer import print_graph
from bessemer.graph.schema import Env, GraphError, build, constant, emit, param, schema_of
from bessemer.graph.verifier import verify

__all__ = [
    "DType",
    "Dim",
    "Env",
    "Graph",
    "GraphError",
    "Node",
    "Shape",
    "Size",
    "TensorType",
    "Value",
    "build",
    "constant",
    "emit",
    "evaluate",
    "evaluate_node",
    "evaluate_rows",
    "evaluate_value",
    "param",
    "parse_graph",
    "print_graph",
    "schema_of",
    "splits",
    "topological",
    "verify",
]
