"""The executable specification and its fast twin. Needs NumPy alone; imports only `spec`.

`decode_meta` is the specification (`plain`): read it beside SPEC.md. `vectorised` was written from SPEC.md too, and
not from `plain`; it serves long campaigns, and the two are held to each other.
"""

if __name__ != "swa_decode_meta.oracle":
    raise ImportError("import this package as swa_decode_meta.oracle (install the project first: pip install -e .)")

from . import plain, vectorised
from .plain import decode_meta

__all__ = ["decode_meta", "plain", "vectorised"]
