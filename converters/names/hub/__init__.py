"""Expected names and shapes in a Hub model's files, from its config.json alone or from transformers."""
