"""How heads draft: `drafter` is what the engine asks of any drafter, `trees` drafts chains and trees of tokens."""
