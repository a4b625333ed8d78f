"""Draft heads: what they read from the frozen target, how they are trained, and how they draft."""
