"""From prompts to a result: `config` and `measure` first, then `passes` (interleaved timing), `summary` and `metrics`
(the figures), `breakdown` (by segment, context, domain), `lossless` and `sampling_check` (is the text the target's
own?), `resume`.
"""
