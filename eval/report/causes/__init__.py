"""What limits a drafter: `diagnosis` asks its rules, those on acceptance in `acceptance_causes`; `findings`
are what they say.
"""
