"""The target's states from a server, for targets that no process of ours holds. Start with `state_server` (ask for the
states of token ids), then `transport` (how they come here), `reading` (from states to stored rows), `vllm_process` (a
server of our own); `in_vllm` runs inside vLLM.
"""
