"""What the pages and the screen write about: `document`, a report as its file has it; `one_result` in words and whether
it proves a gain; `pairs` of results on the same prompts.
"""
