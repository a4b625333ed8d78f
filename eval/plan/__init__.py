"""Planning what to draft at which batch size: `planner` first, then `accepting`, `prediction` (speedup from acceptance
and step times) and `checking`, each within its `budget`; `load` and `server` (requests at a rate, simulated and run),
`machine_profile`, `engine_settings` (the plan for vLLM, SGLang and llama.cpp), `document` (plan.json).
"""
