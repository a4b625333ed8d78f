"""What is measured on: `prompts` reads prompt files, `named` knows the public suites by name."""
