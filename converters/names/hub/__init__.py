"""What the files of a model on the Hub must hold: names and shapes, from its config.json alone or from transformers."""
