"""Other trainers of EAGLE-3 heads on the same rows, batches and draft vocabulary: docs/results/peers.md."""
