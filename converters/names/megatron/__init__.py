"""megatron-core's names against those in the Hub's files."""
