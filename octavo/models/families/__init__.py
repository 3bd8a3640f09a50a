"""One file per model family; siblings never import each other."""
