"""Proofs that what is measured is the target's own: `own_forward` first, then `baseline` (before anything is timed) and
`texts` (those that differ)."""
