"""megatron-core's names, related to the names in the Hub's files."""
