"""Benchmarks of fastopt; smaller numbers are better in all of them."""
