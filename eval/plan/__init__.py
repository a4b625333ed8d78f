"""What to serve at which batch size: `planner` first, then `prediction` (speedup from acceptance and step times),
`load` and `server` (requests at a rate, simulated and run), `machine_profile`, `engine_settings` (the plan as vLLM
and SGLang take it).
"""
