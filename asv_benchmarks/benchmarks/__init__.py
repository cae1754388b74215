"""Benchmarks of fastopt; smaller is better for all of them."""
