"""What happened in every round, and why: recorded by watching the rule, told on a terminal or as a page."""
