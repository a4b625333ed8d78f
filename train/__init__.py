"""The one training loop, over Accelerate."""
