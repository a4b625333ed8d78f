"""What families share: `serving` is the form of what a family says, and of what an engine is told; `tensors` says names
and shapes once, `contracts` what a folder must hold, `foreign` reads folders of others,
`writing` writes ours.
"""
