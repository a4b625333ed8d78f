"""Strict YAML configs (loader.py), errors that a user sees (errors.py), files (files.py, jsonl.py): the lowest floor,
which knows nothing of heads or training. The YAML and JSON files beside them are shipped with the package."""
