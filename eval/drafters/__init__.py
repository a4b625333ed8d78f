"""Drafters other than trained heads. Start with `registry`, which builds them by name: `lookup` copies from the text so
far and from `answers` (`suffix` has its trie, `llamacpp_cache` writes the file for llama-server), `draft_model` and
`translated` (for another tokenizer) are small models, `sparse_self` is the target with few keys, `hybrid` combines
look-ups with a head (`guessing`), `synthetic` drafts with chosen acceptance rates. `host` is the base of drafters on
the CPU.
"""
