"""The target's states from a server, for targets that no process of ours holds. Start with `state_server` (ask for the
states of token ids, which come as files), then `reading` (from states to stored rows), `vllm_process` (a server that is
started or runs); `in_vllm` runs inside vLLM.
"""
