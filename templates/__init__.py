"""Jinja sources of the kernels, one folder a family, and each family's search space as data."""
