"""The contract: SPEC.md in words, and here the data types, the legal domain, the buffer layout and the case file.

Imports no other part of the project. Needs NumPy alone.
"""

if __name__ != "swa_decode_meta.spec":
    raise ImportError("import this package as swa_decode_meta.spec (install the project first: pip install -e .)")

from .batch import (
    INPUTS,
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    INT64_MIN,
    OUTPUTS,
    OWN,
    SHARED,
    TENSORS,
    Batch,
    BoolArray,
    Dependencies,
    Int32Array,
    Int64Array,
    Result,
    TensorSpec,
    check_capacity,
    check_flag,
    check_scalar,
    check_tensor,
    symbols,
)
from .casefile import MAX_ENTRIES, Case, dump_case, load_case, load_cases, read_bytes, save_case, write_atomically
from .domain import check_legal
from .errors import ArgumentError, BackendError, CaseFileError, IllegalBatchError, SwaDecodeMetaError, brief, printable
from .layout import BufferLayout

__all__ = [
    "INPUTS",
    "INT32_MAX",
    "INT32_MIN",
    "INT64_MAX",
    "INT64_MIN",
    "MAX_ENTRIES",
    "OUTPUTS",
    "OWN",
    "SHARED",
    "TENSORS",
    "ArgumentError",
    "BackendError",
    "Batch",
    "BoolArray",
    "BufferLayout",
    "Case",
    "CaseFileError",
    "Dependencies",
    "IllegalBatchError",
    "Int32Array",
    "Int64Array",
    "Result",
    "SwaDecodeMetaError",
    "TensorSpec",
    "brief",
    "check_capacity",
    "check_flag",
    "check_legal",
    "check_scalar",
    "check_tensor",
    "dump_case",
    "load_case",
    "load_cases",
    "printable",
    "read_bytes",
    "save_case",
    "symbols",
    "write_atomically",
]
