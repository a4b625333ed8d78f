"""Prompts to measure on: `prompts` reads prompt files, `named` has the public suites by name."""
