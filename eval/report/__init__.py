"""From results to what people read: `document` (report.json), `page` with `sections` and `charts` (report.html),
`recommendation` (what to deploy), `diagnosis` (what limits a drafter), `comparison` and `comparison_page` (several
evaluations).
"""
