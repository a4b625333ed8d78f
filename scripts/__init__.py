"""The `headstart` command line: one module or package per command."""
