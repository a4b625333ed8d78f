"""Planning what to draft at which batch size: `planner` first, then `accepting` and `prediction` (speedup from
acceptance and step times), each within its `budget`; `served` (a head in llama-server), `machine_profile`,
`engine_settings` (the plan for vLLM, SGLang and llama.cpp), `document` (plan.json).
"""
