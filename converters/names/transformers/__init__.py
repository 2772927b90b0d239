"""transformers' in-memory tensor names, related to the names in the Hub's files."""
