"""The parts of `make quickstart`: a small target, its corpus and its answers. Not in the wheel."""
