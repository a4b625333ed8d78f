"""Pages and charts that are made from results or from docstrings; tests find them stale."""
