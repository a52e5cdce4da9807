"""The demonstration (`make demo`) and the benchmarks (`make bench`); docs/BENCHMARKS.md says how they measure."""
