"""Heads on disk: `folder` (config.json and weights), `record` (what every export keeps of a head), and `fit` (whether a
head fits a target, from their configs alone).
"""
