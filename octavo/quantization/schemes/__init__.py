"""One file per checkpoint scheme: stored tensors to Weights."""
