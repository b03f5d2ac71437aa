"""Benchmarks of Pumice against its peers; see `python -m benchmarks --help`. Not part of the wheel."""
