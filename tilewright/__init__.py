"""Sparse attention kernels, generated and tuned for the machine they run on."""
