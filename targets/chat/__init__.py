"""Chats of a target: `prompts` has how a row becomes prompt ids, `messages` its turns in one form."""
