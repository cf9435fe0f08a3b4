"""What fits: account, planner, advice, the question before a run, measurement."""
