"""From results to what people read: results/ first (report.json, a result in words), then `console` (the table), the
`screen` with its `conclusion`, `page` with `sections` and `charts` (report.html), `recommendation` (what to deploy),
causes/ (what limits a drafter), `comparison` (several evaluations) and `training_runs`.
"""
