"""Other engines as servers: `llama_server` starts and queries one; `served` measures what a head saves there, `beside`
compares its speed with our engine's.
"""
