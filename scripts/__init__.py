"""The `headstart` command and the shell stories built on it."""
