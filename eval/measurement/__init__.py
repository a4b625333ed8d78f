"""From prompts to a result: `config`, `result` and `measure` first, then `passes` (interleaved timing), `summary` and
`metrics` (the figures), `disturbance`, `breakdown` (by segment, context, domain), `lossless`, `proof` and
`sampling_check` (is the text the target's own?), `resume`. `step_times` and `tree_search` choose what to draft;
`transformers_baseline` and `servers` measure other engines.
"""
