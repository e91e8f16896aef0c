"""Workloads, oracles, verification, timing, search and benchmarks."""
