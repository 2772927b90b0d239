"""The memory that training a model takes, from its config alone."""
