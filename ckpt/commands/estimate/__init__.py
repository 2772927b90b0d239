"""Memory for training a model, estimated from its config."""
