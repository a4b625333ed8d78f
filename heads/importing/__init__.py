"""Heads that others trained or published: `published` finds their files on disk or on the hub, `importers` turns each
known layout into one of our heads.
"""
