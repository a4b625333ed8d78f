"""From results to what people read: `document` (report.json), `console` (the printed table), `page` with `sections` and
`charts` (report.html), `recommendation` (what to deploy), `diagnosis` with `findings` and `acceptance_causes` (what
limits a drafter), `comparison` and `comparison_page` (several evaluations or runs).
"""
