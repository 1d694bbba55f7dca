"""Benchmarks: speed next to other flow libraries, and results next to other methods."""
