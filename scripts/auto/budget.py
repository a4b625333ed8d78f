"""How the time of a run is divided among its stages, as shares of the whole."""

MACHINE = 0.12  # at most, for measuring the machine
ANSWERS = 0.25  # for the target's answers
EVALUATION = 0.22  # kept for the end: evaluation, plan by batch size, export and check
SIZES_SHARE = 0.05  # of the whole, for that plan
HALVING = 0.5  # of what is left for training, to choose among candidates; the rest is the chosen one's
