"""Definitions of figures: `metrics` (acceptance, speedups and their intervals), `repetition`, and what a measurement
records of the machine (`environment`) and of a head's training (`recorded_training`).
"""
