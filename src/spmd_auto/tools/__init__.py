"""Tools around plans: one operation under a strategy, split counts, what a plan does at one place, checks of setups."""
