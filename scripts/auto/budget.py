"""How a run's time budget is divided among its stages. Each value is a share, 0..1."""

MACHINE = 0.12  # of the budget, upper limit: measuring the machine
ANSWERS = 0.25  # of the budget: the target answers prompts
EVALUATION = 0.22  # of the budget, upper limit: evaluation, plan by batch size, export and check
SIZES_SHARE = 0.05  # of the budget, within EVALUATION: the plan by batch size
HALVING = 0.4  # of the remaining training time: successive halving; the chosen candidate gets the rest
