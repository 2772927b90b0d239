"""The names that transformers gives tensors in memory against those in the Hub's files."""
