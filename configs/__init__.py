"""Strict YAML configs (loader.py), user-visible errors (errors.py), files (files.py, jsonl.py, owned.py): the lowest
layer, independent of heads and training. The YAML and JSON files here are shipped with the package."""
