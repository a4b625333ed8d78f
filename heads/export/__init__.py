"""Heads as serving engines load them: one file per layout, and the checker of what was written."""
