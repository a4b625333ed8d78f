"""What runs inside vLLM, whose environment need not have headstart: a server gets this folder on its PYTHONPATH."""
