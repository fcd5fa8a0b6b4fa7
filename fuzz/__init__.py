"""The fuzzer: draws batches, runs them on a target in a child process, and diffs by bytes against the oracle.

The only part that imports all the others. `python -m swa_decode_meta.fuzz --help` lists the commands.
"""

if __name__ != "swa_decode_meta.fuzz":
    raise ImportError("import this package as swa_decode_meta.fuzz (install the project first: pip install -e .)")
