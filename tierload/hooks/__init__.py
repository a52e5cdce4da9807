"""tierload in the trainers that people have: one file a framework, which is imported there and nowhere else."""
