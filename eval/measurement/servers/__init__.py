"""Other engines as servers: `llama_server` runs one and asks it; `served` measures what a head saves there, `beside`
times it beside our engine.
"""
