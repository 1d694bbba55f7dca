"""Benchmarks, comparisons with other methods, and the paper's tables and figures."""
