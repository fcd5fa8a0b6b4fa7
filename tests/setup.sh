#!/bin/sh
# Makes the virtual environment that the Makefile's targets run in. Called by `make setup`.
set -eu

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "error: $PYTHON is missing or older than 3.10; name another with make PYTHON=..." >&2
    exit 2
fi

has() { "$1" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$2') is None)"; }

echo "setting up $VENV: a minute or two, longer where torch has to be downloaded"
# A container's own torch is seen through system-site-packages, whatever build it is.
site=
if has "$PYTHON" torch; then
    site=--system-site-packages
fi
rm -rf "$VENV"
"$PYTHON" -m venv $site "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check"

if has "$VENV/bin/python" torch; then
    echo "using the torch that is here: $("$VENV/bin/python" -c 'import torch; print(torch.__version__)')"
else
    $pip install --quiet "$TORCH"
fi
# CPU builds of torch bring no triton; CUDA and ROCm builds bring their own, which must stay.
if ! has "$VENV/bin/python" triton; then
    $pip install --quiet "$TRITON"
fi
# Whatever else is installed must not move either of them.
$pip freeze --all | grep -iE '^(torch|triton|pytorch-triton[a-z-]*)(==| @ )' | sed 's/ @ .*//' >"$VENV/keep.txt" || true
$pip install --quiet --constraint "$VENV/keep.txt" --editable '.[fuzz,dev]'
