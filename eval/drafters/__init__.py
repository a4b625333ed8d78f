"""What proposes tokens besides trained heads. Start with `registry`, which builds them by name: `lookup` copies from
the text so far and from `answers` (`suffix` has the trie behind it, `llamacpp_cache` the file for llama-server),
`draft_model` and `translated` (for another tokenizer) are small models, `sparse_self` is the target with few keys,
`hybrid` joins a head with look-ups, `synthetic` drafts to order. `host` is the base of those that read texts.
"""
