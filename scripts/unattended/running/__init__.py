"""How an unattended run goes on its way: `session` first, with its stages, then the `journal` that it resumes from, the
`clock` of its budget, and `steps`, the commands that it starts.
"""
