"""Strict YAML configs and the errors a user sees: the lowest floor, which knows nothing of heads or training."""
