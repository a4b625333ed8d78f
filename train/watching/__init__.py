"""What watches a run: its speed, the curve of its validations, what stops it, and where its metrics go."""
