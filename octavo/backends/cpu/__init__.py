"""The CPU backend: C++ kernels behind one call per step."""
