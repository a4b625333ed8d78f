"""What a run is told and reads before its first step: its config, its launch, its target and data, and the record of
what it started from. Read `config` first.
"""
