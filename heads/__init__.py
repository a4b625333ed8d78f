"""Draft heads: what they read of the frozen target, how they learn and how they draft."""
