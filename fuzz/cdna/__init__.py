"""CDNA GPUs without one: an emulator that runs the machine code which Triton compiles for gfx942, gfx950 and gfx90a.

assembly.py reads what the compiler printed; scalar.py, vector.py and memory.py say what each instruction does;
translate.py turns a kernel's blocks into Python functions once; machine.py runs workgroups of them over 64 NumPy lanes;
regions.py checks every byte that is touched; triton_kernels.py puts it all in the GPU's stead.
"""
