"""Models as programs: one file per family, no tensors. Knows checkpoints' names, not their bytes."""
