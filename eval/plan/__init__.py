"""Planning what to draft at which batch size: `planner` first, then `accepting` (what texts accept), `prediction`
(speedup from acceptance and step times), `budget` (how much there is time for), `engine_settings` (the plan for vLLM,
SGLang and llama.cpp); `in_server` plans by the rounds of the server that serves.
"""
