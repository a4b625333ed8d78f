"""What families share: `serving` is the form of what a family says, and of what an engine is told; `contracts` has what
a folder must hold, with the names and shapes of the family's own head; `foreign` reads folders of others, `writing`
writes ours.
"""
