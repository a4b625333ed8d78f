"""Drafters other than trained heads. Start with `registry`, which builds them by name: `lookup` copies from the text so
far and from `answers` (`suffix` has its trie, `llamacpp_cache` writes the file for llama-server), `draft_model` is a
small model, `hybrid` combines look-ups with a head (`guessing`, `unread`, `asking`). `host` is the base of drafters on
the CPU.
"""
