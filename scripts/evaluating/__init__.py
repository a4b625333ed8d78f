"""`headstart eval`: `evaluate` with its options, `eval_run` in our engine, `eval_served` in an engine's server,
`eval_drafts`, the drafters that were asked for.
"""
