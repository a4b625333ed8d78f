"""From conversations, prompts or plain text to training batches with exact masks."""
