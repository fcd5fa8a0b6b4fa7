"""`python -m swa_decode_meta.fuzz`."""

from .cli import main

main()
