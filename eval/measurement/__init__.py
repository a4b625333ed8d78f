"""From prompts to a result: `result` and `measure` first, then `passes` (interleaved timing), `summary` (the figures),
`disturbance`, `breakdown` (by segment, context, domain) and `resume`. `step_times` has how long rounds take.
"""
